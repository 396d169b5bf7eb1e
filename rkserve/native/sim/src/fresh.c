/* Input on its way into the KV cache: ids, and rows where an id does not say everything. */
#include "rksim.h"

#include <stdlib.h>
#include <string.h>

void fresh_set_row(struct fresh *fresh, uint32_t at, uint64_t row) {
    if (at >= fresh->rows_room) {
        fresh->rows_room = 2 * at + 64;
        fresh->rows = must_grow(fresh->rows, fresh->rows_room * sizeof *fresh->rows);
    }
    while (fresh->n_rows <= at) fresh->rows[fresh->n_rows++] = 0;
    fresh->rows[at] = row;
}

void fresh_add(struct fresh *fresh, int32_t id, uint64_t row) {
    ids_add(&fresh->ids, &id, 1);
    if (row) fresh_set_row(fresh, fresh->ids.n - 1, row);
}

void fresh_free(struct fresh *fresh) {
    ids_free(&fresh->ids);
    free(fresh->rows);
    memset(fresh, 0, sizeof *fresh);
}
