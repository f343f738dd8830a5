/* The HIP runtime, opened at run time, and what the files of the HIP driver share.
 *
 * Never run on AMD hardware: tests/stubs/hip_stub.c stands in for it.  Types and values: ROCm/rocm-systems
 * projects/hip/include/hip/hip_runtime_api.h (since ROCm 5.5). */
#ifndef EKV_HIP_H
#define EKV_HIP_H

#include "internal.h"

typedef struct {
    int type; /* 1: device */
    int id;
} ekv_hip_location;

typedef struct {
    int type; /* 1: pinned */
    int requested_handle_types;
    ekv_hip_location location;
    void *win32_handle_meta_data;
    struct {
        unsigned char compression_type;
        unsigned char gpu_direct_rdma_capable;
        unsigned short usage;
    } alloc_flags;
} ekv_hip_prop;

typedef struct {
    ekv_hip_location location;
    int flags; /* 3: read and write */
} ekv_hip_access;

_Static_assert(sizeof(ekv_hip_prop) == 32 && offsetof(ekv_hip_prop, alloc_flags) == 24, "hipMemAllocationProp");
_Static_assert(sizeof(ekv_hip_access) == 12 && offsetof(ekv_hip_access, flags) == 8, "hipMemAccessDesc");

enum {
    HIP_ERROR_INVALID_VALUE = 1,
    HIP_ERROR_OUT_OF_MEMORY = 2,
    HIP_ERROR_INVALID_DEVICE = 101,
    VMM_SUPPORTED = 89, /* hipDeviceAttributeVirtualMemoryManagementSupported */
    STREAM_NON_BLOCKING = 1,
    CAPTURE_MODE_RELAXED = 2,
    TYPE_FD = 1,
    TYPE_FABRIC = 8
};

/* symbol, member, parameters */
#define SYMBOLS(X)                                                                                                   \
    X(hipRuntimeGetVersion, runtime_version, (int *))                                                                \
    X(hipGetDeviceCount, get_device_count, (int *))                                                                  \
    X(hipGetDevice, get_device, (int *))                                                                             \
    X(hipSetDevice, set_device, (int))                                                                               \
    X(hipDeviceGetAttribute, device_get_attribute, (int *, int, int))                                                \
    X(hipDeviceSynchronize, device_synchronize, (void))                                                              \
    X(hipThreadExchangeStreamCaptureMode, exchange_capture_mode, (int *))                                            \
    X(hipStreamCreateWithFlags, stream_create, (void **, unsigned))                                                  \
    X(hipStreamSynchronize, stream_synchronize, (void *))                                                            \
    X(hipStreamGetCaptureInfo, stream_capture_info, (void *, int *, unsigned long long *))                           \
    X(hipMemGetAllocationGranularity, granularity, (size_t *, const ekv_hip_prop *, int))                            \
    X(hipMemAddressReserve, address_reserve, (void **, size_t, size_t, void *, unsigned long long))                  \
    X(hipMemAddressFree, address_free, (void *, size_t))                                                             \
    X(hipMemCreate, create, (ekv_handle *, size_t, const ekv_hip_prop *, unsigned long long))                        \
    X(hipMemRelease, release, (ekv_handle))                                                                          \
    X(hipMemMap, map, (void *, size_t, size_t, ekv_handle, unsigned long long))                                      \
    X(hipMemUnmap, unmap, (void *, size_t))                                                                          \
    X(hipMemSetAccess, set_access, (void *, size_t, const ekv_hip_access *, size_t))                                 \
    X(hipMemsetAsync, memset_async, (void *, int, size_t, void *))                                                   \
    X(hipMemExportToShareableHandle, export_handle, (void *, ekv_handle, int, unsigned long long))                   \
    X(hipMemImportFromShareableHandle, import_handle, (ekv_handle *, void *, int))                                   \
    X(hipMalloc, alloc, (void **, size_t))                                                                           \
    X(hipFree, free, (void *))                                                                                       \
    X(hipMemGetInfo, get_info, (size_t *, size_t *))                                                                 \
    X(hipGetLastError, get_last_error, (void))

typedef struct {
    void *library;
    const char *(*error_name)(int);
#define MEMBER(symbol, member, parameters) int (*member) parameters;
    SYMBOLS(MEMBER)
#undef MEMBER
} ekv_hip_library;

extern ekv_hip_library ekv_hip;

/* Opens the library; the status of a failure. */
int ekv_hip_load(void);
const char *ekv_hip_error_name(int code);
/* The code of a call: recorded when it is a failure, and not left in the thread's last error. */
int ekv_hip_check(ekv_device *device, const char *call, int code, uint64_t address, uint64_t size);
/* The same for a call that may fail: not recorded either. */
int ekv_hip_quietly(int code);

typedef struct {
    int capture_mode, caller;
    bool switched, exchanged;
} ekv_hip_scope;

/* Makes the device current and the capture mode relaxed; leave is called whatever enter says. */
int ekv_hip_enter(ekv_device *device, ekv_hip_scope *s);
void ekv_hip_leave(ekv_hip_scope *s);

/* One driver call, recorded when it fails. */
#define CALL(device, symbol, address, size, expression)                                                              \
    ekv_hip_check(device, #symbol, ekv_hip.expression, address, size)

/* One driver call with its device current. */
#define ON_DEVICE(device, symbol, address, size, expression)                                                         \
    do {                                                                                                             \
        ekv_hip_scope s;                                                                                             \
        int code = ekv_hip_enter(device, &s);                                                                        \
        if (!code)                                                                                                   \
            code = CALL(device, symbol, address, size, expression);                                                  \
        ekv_hip_leave(&s);                                                                                           \
        return code;                                                                                                 \
    } while (0)

/* hip_memory.c: the table's functions that deal in addresses and handles. */
ekv_hip_prop ekv_hip_properties(const ekv_device *device, int handle_kind);
int ekv_hip_reserve(ekv_device *device, uint64_t size, uint64_t alignment, uint64_t *address);
int ekv_hip_create(ekv_device *device, int handle_kind, uint64_t size, ekv_handle *handle);
int ekv_hip_import_file(ekv_device *device, int file, uint64_t size, ekv_handle *handle);
int ekv_hip_map(ekv_device *device, uint64_t address, uint64_t size, ekv_handle handle);
int ekv_hip_set_access(ekv_device *device, uint64_t address, uint64_t size);
int ekv_hip_unmap(ekv_device *device, uint64_t address, uint64_t size);
int ekv_hip_release(ekv_device *device, ekv_handle handle, uint64_t size);
int ekv_hip_unreserve(ekv_device *device, uint64_t address, uint64_t size);

#endif
