/* Cross attention: what the encoder made of its input, handed to the decoder. Nothing is computed
 * with it; everything is read and comes down to a digest, on which the following texts hang.
 *
 * Assumed, as the vendor does not say: keys and values have SIM_CROSS_DIM floats per token (layers
 * times heads times head size), mask and positions one element per token. */
#include "rksim.h"

bool cross_attn_digest(const RKLLMCrossAttnParam *param, uint64_t *digest) {
    if (!param || !param->encoder_k_cache || !param->encoder_v_cache || !param->encoder_mask ||
        !param->encoder_pos || param->num_tokens < 1) {
        log_line("E rkllm: cross attention needs k cache, v cache, mask, pos and num_tokens");
        return false;
    }
    size_t n = (size_t)param->num_tokens, cache = n * SIM_CROSS_DIM * sizeof(float);
    uint64_t sum = n;
    sum = spread(sum ^ crc32_add(0, param->encoder_k_cache, cache));
    sum = spread(sum ^ crc32_add(0, param->encoder_v_cache, cache));
    sum = spread(sum ^ crc32_add(0, param->encoder_mask, n * sizeof *param->encoder_mask));
    *digest = spread(sum ^ crc32_add(0, param->encoder_pos, n * sizeof *param->encoder_pos));
    return true;
}
