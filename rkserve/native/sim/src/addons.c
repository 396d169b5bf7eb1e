/* The switches of what addons.h offers, read from the environment at init. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>

/* What a runtime makes of a prompt cache that is loaded after an aborted run: it falls over, it
 * does not mind, or, if nothing is said, that is misuse like any other. */
static bool read_cache_after_abort(struct features *f) {
    const char *text = getenv("RKSIM_CACHE_AFTER_ABORT");
    if (!text || !*text) return true;
    f->cache_after_abort_crash = strcmp(text, "crash") == 0;
    f->cache_after_abort_ok = strcmp(text, "ok") == 0;
    if (f->cache_after_abort_crash || f->cache_after_abort_ok) return true;
    log_line("E rkllm-sim: RKSIM_CACHE_AFTER_ABORT must be crash or ok, but got '%s'", text);
    return false;
}

bool features_read(struct features *f) {
    f->lora_ms_per_mb = 10; /* assumed: read at 200 MB/s, and as long again to place it */
    f->disk_mb_per_s = 200;
    return env_number("RKSIM_LORA_MS_PER_MB", 0, &f->lora_ms_per_mb) &&
           env_number("RKSIM_DISK_MB_PER_S", 0.001, &f->disk_mb_per_s) &&
           env_flag("RKSIM_CACHE_DENSE", &f->cache_dense) &&
           env_flag("RKSIM_FOREIGN_CACHE", &f->foreign_cache) &&
           env_flag("RKSIM_CACHE_BOUND", &f->cache_bound) &&
           env_flag("RKSIM_CACHE_WITH_HISTORY", &f->cache_with_history) &&
           env_flag("RKSIM_NO_SAVE_WITH_HISTORY", &f->no_save_with_history) &&
           env_flag("RKSIM_NO_TOKENIZER", &f->no_tokenizer) &&
           env_flag("RKSIM_NO_EMBEDDING", &f->no_embedding) && read_cache_after_abort(f);
}
