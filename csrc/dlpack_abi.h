/*
 * The DLPack ABI, version 1: how array libraries describe their memory to each other. The layout is the published one;
 * only what flexgemm reads or writes is named. A consumer may rely on the head of DLManagedTensorVersioned (version,
 * manager_ctx, deleter) and of the exchange API (header) in every major version.
 */
#ifndef FG_DLPACK_ABI_H
#define FG_DLPACK_ABI_H

#include <stdint.h>

enum { DL_MAJOR = 1, DL_MINOR = 3 };

typedef struct {
    uint32_t major, minor;
} DLPackVersion;

enum { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };

typedef struct {
    int32_t device_type;
    int32_t device_id;
} DLDevice;

enum {
    kDLInt = 0,
    kDLUInt = 1,
    kDLFloat = 2,
    kDLOpaqueHandle = 3,
    kDLBfloat = 4,
    kDLComplex = 5,
    kDLBool = 6,
    kDLFloat8_e3m4 = 7,
    kDLFloat8_e4m3 = 8,
    kDLFloat8_e4m3b11fnuz = 9,
    kDLFloat8_e4m3fn = 10,
    kDLFloat8_e4m3fnuz = 11,
    kDLFloat8_e5m2 = 12,
    kDLFloat8_e5m2fnuz = 13,
    kDLFloat8_e8m0fnu = 14,
};

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides; /* elements; NULL (before version 1.2) means contiguous */
    uint64_t byte_offset;
} DLTensor;

/* Behind a capsule named "dltensor". */
typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

enum { DL_FLAG_READ_ONLY = 1, DL_FLAG_IS_COPIED = 2 };

/* Behind a capsule named "dltensor_versioned". */
typedef struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef struct DLPackExchangeAPIHeader {
    DLPackVersion version;
    struct DLPackExchangeAPIHeader *prev_api; /* an older table, or NULL */
} DLPackExchangeAPIHeader;

/* Behind the capsule "dlpack_exchange_api" at type(x).__dlpack_c_exchange_api__. Each function returns 0, or -1 with a
 * Python exception set; "no_sync": the caller runs on the stream that current_work_stream reports. */
typedef struct {
    DLPackExchangeAPIHeader header;
    int (*managed_tensor_allocator)(DLTensor *prototype, DLManagedTensorVersioned **out, void *error_context,
                                    void (*set_error)(void *error_context, const char *kind, const char *message));
    int (*managed_tensor_from_py_object_no_sync)(void *object, DLManagedTensorVersioned **out);
    int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned *tensor, void **out_object);
    int (*dltensor_from_py_object_no_sync)(void *object, DLTensor *out); /* borrows from the object; may be NULL */
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out_stream);
} DLPackExchangeAPI;

#endif
