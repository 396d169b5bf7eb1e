/*
 * The one function that is called before a library's release is known. It returns default
 * parameters through a hidden pointer; this struct is larger than that of any release. Bytes that a
 * release leaves unwritten stay undefined.
 */

typedef struct { uint8_t bytes[256]; } Oversized;

Oversized rkllm_createDefaultParam(void);
