/* Declarations of the RKNN runtime 2.3 and later (librknnrt), as far as an image encoder needs them.
 *
 * Written anew from the numbers of its binary interface: names, order and types of the members, and
 * the values of the enums. This file is the input to cffi's cdef() and is also included by the
 * simulated runtime, so it holds declarations only: no includes, no macros.
 * tests/native/binding/test_image_encoder.py holds every size and offset to tests/data/rknn_abi.json.
 */
typedef uint64_t rknn_context; /* on 64-bit machines */

typedef enum {
    RKNN_SUCC = 0,
    RKNN_ERR_FAIL = -1,
    RKNN_ERR_PARAM_INVALID = -5,
    RKNN_ERR_MODEL_INVALID = -6,
    RKNN_ERR_CTX_INVALID = -7,
    RKNN_ERR_INPUT_INVALID = -8,
    RKNN_ERR_OUTPUT_INVALID = -9
} rknn_code;

typedef enum {
    RKNN_QUERY_IN_OUT_NUM = 0,
    RKNN_QUERY_INPUT_ATTR = 1,
    RKNN_QUERY_OUTPUT_ATTR = 2,
    RKNN_QUERY_SDK_VERSION = 5
} rknn_query_cmd;

typedef enum {
    RKNN_TENSOR_FLOAT32 = 0,
    RKNN_TENSOR_FLOAT16 = 1,
    RKNN_TENSOR_INT8 = 2,
    RKNN_TENSOR_UINT8 = 3
} rknn_tensor_type;

typedef enum { RKNN_TENSOR_QNT_NONE = 0 } rknn_tensor_qnt_type;

typedef enum { RKNN_TENSOR_NCHW = 0, RKNN_TENSOR_NHWC = 1 } rknn_tensor_format;

typedef enum {
    RKNN_NPU_CORE_AUTO = 0,
    RKNN_NPU_CORE_0_1 = 3,
    RKNN_NPU_CORE_0_1_2 = 7
} rknn_core_mask;

typedef struct {
    uint32_t n_input;
    uint32_t n_output;
} rknn_input_output_num;

typedef struct {
    uint32_t index; /* set by the caller of rknn_query */
    uint32_t n_dims;
    uint32_t dims[16];
    char name[256];
    uint32_t n_elems;
    uint32_t size;
    rknn_tensor_format fmt;
    rknn_tensor_type type;
    rknn_tensor_qnt_type qnt_type;
    int8_t fl;
    int32_t zp;
    float scale;
    uint32_t w_stride;
    uint32_t size_with_stride;
    uint8_t pass_through;
    uint32_t h_stride;
} rknn_tensor_attr;

typedef struct {
    char api_version[256];
    char drv_version[256];
} rknn_sdk_version;

typedef struct {
    uint32_t index;
    void* buf;
    uint32_t size;
    uint8_t pass_through;
    rknn_tensor_type type;
    rknn_tensor_format fmt;
} rknn_input;

typedef struct {
    uint8_t want_float;
    uint8_t is_prealloc;
    uint32_t index;
    void* buf;
    uint32_t size;
} rknn_output;

/* With a size of 0 the model is a path. The last argument of these is NULL here. */
int rknn_init(rknn_context* context, void* model, uint32_t size, uint32_t flag, void* extend);
int rknn_destroy(rknn_context context);
int rknn_query(rknn_context context, rknn_query_cmd cmd, void* info, uint32_t size);
int rknn_inputs_set(rknn_context context, uint32_t n_inputs, rknn_input* inputs);
int rknn_run(rknn_context context, void* extend);
int rknn_outputs_get(rknn_context context, uint32_t n_outputs, rknn_output* outputs, void* extend);
int rknn_outputs_release(rknn_context context, uint32_t n_outputs, rknn_output* outputs);
int rknn_set_core_mask(rknn_context context, rknn_core_mask core_mask);
