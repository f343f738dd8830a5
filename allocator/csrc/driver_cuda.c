/* CUDA driver over libcuda, opened at run time: this file needs neither CUDA headers nor nvcc.
 *
 * Every call runs with the primary context of its device pushed (retained once per device, as the CUDA runtime and
 * PyTorch do) and restores the caller's, and with the stream capture mode relaxed, so that it may be made while the
 * thread captures a graph.
 *
 * Types, values and versioned symbol names: CUDA 13.0 cuda.h (unchanged since 11.2, where cuMem* appeared). */
#include "internal.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int type; /* 1: device */
    int id;
} location;

typedef struct {
    int type; /* 1: pinned */
    int requested_handle_types;
    location location;
    void *win32_handle_meta_data;
    struct {
        unsigned char compression_type;
        unsigned char gpu_direct_rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } alloc_flags;
} allocation_prop;

typedef struct {
    location location;
    int flags; /* 3: read and write */
} access_desc;

_Static_assert(sizeof(allocation_prop) == 32 && offsetof(allocation_prop, alloc_flags) == 24, "CUmemAllocationProp");
_Static_assert(sizeof(access_desc) == 12 && offsetof(access_desc, flags) == 8, "CUmemAccessDesc");

enum {
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    VMM_SUPPORTED = 102,
    GPU_DIRECT_RDMA_WITH_VMM_SUPPORTED = 110,
    STREAM_NON_BLOCKING = 1,
    CAPTURE_MODE_RELAXED = 2,
    TYPE_FD = 1,
    TYPE_FABRIC = 8
};

/* symbol, member, parameters */
#define SYMBOLS(X)                                                                                                   \
    X(cuInit, init, (unsigned))                                                                                      \
    X(cuDeviceGet, device_get, (int *, int))                                                                         \
    X(cuDeviceGetAttribute, device_get_attribute, (int *, int, int))                                                 \
    X(cuDevicePrimaryCtxRetain, primary_context_retain, (void **, int))                                              \
    X(cuDevicePrimaryCtxRelease_v2, primary_context_release, (int))                                                  \
    X(cuCtxPushCurrent_v2, context_push, (void *))                                                                   \
    X(cuCtxPopCurrent_v2, context_pop, (void **))                                                                    \
    X(cuCtxSynchronize, context_synchronize, (void))                                                                 \
    X(cuThreadExchangeStreamCaptureMode, exchange_capture_mode, (int *))                                             \
    X(cuStreamCreate, stream_create, (void **, unsigned))                                                            \
    X(cuStreamSynchronize, stream_synchronize, (void *))                                                             \
    X(cuStreamGetCaptureInfo_v2, stream_capture_info, (void *, int *, uint64_t *, void *, void *, void *))           \
    X(cuMemGetAllocationGranularity, granularity, (size_t *, const allocation_prop *, int))                          \
    X(cuMemAddressReserve, address_reserve, (uint64_t *, size_t, size_t, uint64_t, uint64_t))                        \
    X(cuMemAddressFree, address_free, (uint64_t, size_t))                                                            \
    X(cuMemCreate, create, (ekv_handle *, size_t, const allocation_prop *, uint64_t))                                \
    X(cuMemRelease, release, (ekv_handle))                                                                           \
    X(cuMemMap, map, (uint64_t, size_t, size_t, ekv_handle, uint64_t))                                               \
    X(cuMemUnmap, unmap, (uint64_t, size_t))                                                                         \
    X(cuMemSetAccess, set_access, (uint64_t, size_t, const access_desc *, size_t))                                   \
    X(cuMemsetD8Async, memset_async, (uint64_t, unsigned char, size_t, void *))                                      \
    X(cuMemExportToShareableHandle, export_handle, (void *, ekv_handle, int, uint64_t))                             \
    X(cuMemImportFromShareableHandle, import_handle, (ekv_handle *, void *, int))                                    \
    X(cuMemAlloc_v2, alloc, (uint64_t *, size_t))                                                                    \
    X(cuMemFree_v2, free, (uint64_t))                                                                                \
    X(cuMemGetInfo_v2, get_info, (size_t *, size_t *))                                                               \
    X(cuGetErrorName, error_name, (int, const char **))

static struct {
    void *library;
#define MEMBER(symbol, member, parameters) int (*member) parameters;
    SYMBOLS(MEMBER)
#undef MEMBER
} cuda;

/* One driver call, recorded when it fails. */
#define CALL(device, symbol, address, size, expression) check(device, #symbol, cuda.expression, address, size)

static int check(ekv_device *device, const char *call, int code, uint64_t address, uint64_t size)
{
    return code ? ekv_fail(device, call, code, address, size) : 0;
}

static const char *cuda_error_name(int code)
{
    const char *name = NULL;
    if (!cuda.error_name || cuda.error_name(code, &name) || !name)
        return "unknown error";
    return name;
}

static int load(ekv_device *device)
{
    const char *path = getenv("EKV_CUDA_LIBRARY");
    void *library;
    if (cuda.library)
        return 0;
    library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return ekv_error(EKV_UNSUPPORTED, "cuda: %s", dlerror());
#define LOAD(symbol, member, parameters)                                                                             \
    *(void **)&cuda.member = dlsym(library, #symbol);                                                                \
    if (!cuda.member) {                                                                                              \
        dlclose(library);                                                                                            \
        return ekv_error(EKV_UNSUPPORTED, "cuda: the driver library has no %s: it is older than CUDA 11.2", #symbol); \
    }
    SYMBOLS(LOAD)
#undef LOAD
    if (CALL(device, cuInit, 0, 0, init(0))) {
        dlclose(library); /* the next attempt starts anew */
        return ekv_error_status();
    }
    cuda.library = library;
    return 0;
}

typedef struct {
    int capture_mode;
    bool pushed, exchanged;
} scope;

static int enter(ekv_device *device, scope *s)
{
    int code = CALL(device, cuCtxPushCurrent_v2, 0, 0, context_push(device->context));
    *s = (scope){.capture_mode = CAPTURE_MODE_RELAXED, .pushed = !code};
    if (!code)
        s->exchanged = !cuda.exchange_capture_mode(&s->capture_mode);
    return code;
}

/* The caller's state must come back: a refusal is answered by asking once more. */
static void leave(scope *s)
{
    void *ours;
    if (s->exchanged && cuda.exchange_capture_mode(&s->capture_mode))
        cuda.exchange_capture_mode(&s->capture_mode);
    if (s->pushed && cuda.context_pop(&ours))
        cuda.context_pop(&ours);
}

/* One driver call with the device's context current. */
#define IN_CONTEXT(device, symbol, address, size, expression)                                                        \
    do {                                                                                                             \
        scope s;                                                                                                     \
        int code = enter(device, &s);                                                                                \
        if (!code)                                                                                                   \
            code = CALL(device, symbol, address, size, expression);                                                  \
        leave(&s);                                                                                                   \
        return code;                                                                                                 \
    } while (0)

static int create_stream(ekv_device *device) { IN_CONTEXT(device, cuStreamCreate, 0, 0, stream_create(&device->stream, STREAM_NON_BLOCKING)); }

static int cuda_open(ekv_device *device)
{
    int handle = 0, supported = 0, code = load(device);
    bool retained = false;
    if (!code)
        code = CALL(device, cuDeviceGet, 0, 0, device_get(&handle, device->ordinal));
    if (!code)
        code = CALL(device, cuDeviceGetAttribute, 0, 0, device_get_attribute(&supported, VMM_SUPPORTED, handle));
    if (!code && !supported)
        code = ekv_error(EKV_UNSUPPORTED, "cuda: device %d has no virtual memory management", device->ordinal);
    if (!code)
        code = CALL(device, cuDevicePrimaryCtxRetain, 0, 0, primary_context_retain(&device->context, handle));
    retained = !code;
    if (!code)
        code = create_stream(device);
    if (code && retained)
        cuda.primary_context_release(handle);
    return code;
}

static allocation_prop properties(const ekv_device *device, int handle_kind)
{
    allocation_prop prop;
    memset(&prop, 0, sizeof prop);
    prop.type = 1;
    prop.location = (location){1, device->ordinal};
    if (handle_kind == EKV_HANDLE_FABRIC)
        prop.requested_handle_types = TYPE_FABRIC | TYPE_FD; /* other nodes take one, this one's processes the other */
    else if (handle_kind != EKV_HANDLE_NONE)
        prop.requested_handle_types = TYPE_FD;
    prop.alloc_flags.gpu_direct_rdma_capable = handle_kind == EKV_HANDLE_FD_RDMA || handle_kind == EKV_HANDLE_FABRIC;
    return prop;
}

static int cuda_granularity(ekv_device *device, int handle_kind, bool recommended, uint64_t *granularity)
{
    allocation_prop prop = properties(device, handle_kind);
    size_t bytes = 0;
    int code = CALL(device, cuMemGetAllocationGranularity, 0, 0, granularity(&bytes, &prop, recommended));
    *granularity = bytes;
    return code;
}

static int cuda_reserve(ekv_device *device, uint64_t size, uint64_t alignment, uint64_t *address)
{
    IN_CONTEXT(device, cuMemAddressReserve, 0, size, address_reserve(address, size, alignment, 0, 0));
}

static int cuda_create(ekv_device *device, int handle_kind, uint64_t size, ekv_handle *handle)
{
    allocation_prop prop = properties(device, handle_kind);
    IN_CONTEXT(device, cuMemCreate, 0, size, create(handle, size, &prop, 0));
}

static int cuda_map(ekv_device *device, uint64_t address, uint64_t size, ekv_handle handle)
{
    IN_CONTEXT(device, cuMemMap, address, size, map(address, size, 0, handle, 0));
}

static int cuda_set_access(ekv_device *device, uint64_t address, uint64_t size)
{
    access_desc access = {{1, device->ordinal}, 3};
    IN_CONTEXT(device, cuMemSetAccess, address, size, set_access(address, size, &access, 1));
}

static int cuda_unmap(ekv_device *device, uint64_t address, uint64_t size)
{
    IN_CONTEXT(device, cuMemUnmap, address, size, unmap(address, size));
}

static int cuda_release(ekv_device *device, ekv_handle handle, uint64_t size)
{
    IN_CONTEXT(device, cuMemRelease, 0, size, release(handle));
}

static int cuda_unreserve(ekv_device *device, uint64_t address, uint64_t size)
{
    IN_CONTEXT(device, cuMemAddressFree, address, size, address_free(address, size));
}

static int cuda_zero(ekv_device *device, uint64_t address, uint64_t size)
{
    IN_CONTEXT(device, cuMemsetD8Async, address, size, memset_async(address, 0, size, device->stream));
}

static int cuda_zero_wait(ekv_device *device)
{
    IN_CONTEXT(device, cuStreamSynchronize, 0, 0, stream_synchronize(device->stream));
}

static int cuda_stream_wait(ekv_device *device, void *stream)
{
    IN_CONTEXT(device, cuStreamSynchronize, 0, 0, stream_synchronize(stream));
}

static int cuda_capture_id(ekv_device *device, void *stream, uint64_t *id)
{
    int capturing = 0;
    scope s;
    int code = enter(device, &s);
    if (!code)
        code = CALL(device, cuStreamGetCaptureInfo_v2, 0, 0,
                    stream_capture_info(stream, &capturing, id, NULL, NULL, NULL));
    leave(&s);
    if (code || !capturing)
        *id = 0;
    return code;
}

static int cuda_synchronize(ekv_device *device)
{
    IN_CONTEXT(device, cuCtxSynchronize, 0, 0, context_synchronize());
}

static int cuda_memory_info(ekv_device *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    IN_CONTEXT(device, cuMemGetInfo_v2, 0, 0, get_info((size_t *)free_bytes, (size_t *)total_bytes));
}

static int cuda_gpu_direct_rdma(ekv_device *device, bool *capable)
{
    int value = 0, code;
    code = CALL(device, cuDeviceGetAttribute, 0, 0,
                device_get_attribute(&value, GPU_DIRECT_RDMA_WITH_VMM_SUPPORTED, device->ordinal));
    *capable = !code && value;
    return code;
}

static int cuda_export_file(ekv_device *device, ekv_handle handle, int *file)
{
    IN_CONTEXT(device, cuMemExportToShareableHandle, 0, 0, export_handle(file, handle, TYPE_FD, 0));
}

static int cuda_import_file(ekv_device *device, int file, uint64_t size, ekv_handle *handle)
{
    IN_CONTEXT(device, cuMemImportFromShareableHandle, 0, size,
               import_handle(handle, (void *)(intptr_t)file, TYPE_FD));
}

static int cuda_allocate(ekv_device *device, uint64_t size, uint64_t *address)
{
    IN_CONTEXT(device, cuMemAlloc_v2, 0, size, alloc(address, size));
}

static int cuda_free(ekv_device *device, uint64_t address)
{
    IN_CONTEXT(device, cuMemFree_v2, address, 0, free(address));
}

const ekv_driver ekv_cuda_driver = {
    .name = "cuda",
    .kind = EKV_CUDA,
    .out_of_memory_code = CUDA_ERROR_OUT_OF_MEMORY,
    .fresh_memory_is_zero = false,
    .open = cuda_open,
    .granularity = cuda_granularity,
    .reserve = cuda_reserve,
    .create = cuda_create,
    .map = cuda_map,
    .set_access = cuda_set_access,
    .unmap = cuda_unmap,
    .release = cuda_release,
    .unreserve = cuda_unreserve,
    .zero = cuda_zero,
    .zero_wait = cuda_zero_wait,
    .stream_wait = cuda_stream_wait,
    .capture_id = cuda_capture_id,
    .synchronize = cuda_synchronize,
    .memory_info = cuda_memory_info,
    .gpu_direct_rdma = cuda_gpu_direct_rdma,
    .export_file = cuda_export_file,
    .import_file = cuda_import_file,
    .allocate = cuda_allocate,
    .free = cuda_free,
    .error_name = cuda_error_name,
};
