/* Digests: a checksum of bytes, and a scrambler of numbers. It knows nothing of what they are of.
 * CRC-32 is that of zlib, so that Python can make and check the simulator's files. */
#include "rksim.h"

static uint32_t crc_table[256];
static pthread_once_t crc_once = PTHREAD_ONCE_INIT;

static void make_crc_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? 0xEDB88320u ^ crc >> 1 : crc >> 1;
        crc_table[byte] = crc;
    }
}

uint32_t crc32_add(uint32_t crc, const void *bytes, size_t n) {
    const unsigned char *at = bytes;
    pthread_once(&crc_once, make_crc_table);
    crc = ~crc;
    for (size_t i = 0; i < n; i++) crc = crc_table[(crc ^ at[i]) & 0xFF] ^ crc >> 8;
    return ~crc;
}

uint64_t spread(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
