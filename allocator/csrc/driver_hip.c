/* HIP driver over libamdhip64, opened at run time.  Never run on AMD hardware: tests/stubs/hip_stub.c stands in for it.
 *
 * HIP has no context stack: every call runs with its device current and the caller's restored.  A failed HIP call stays
 * in the thread's last error, where PyTorch would take it for its own, so it is fetched away.
 *
 * Types and values: ROCm/rocm-systems projects/hip/include/hip/hip_runtime_api.h (since ROCm 5.5).  What this driver
 * does beyond the calls follows reports of ROCm users:
 * - handles are made of the recommended granularity, 2 MiB at least (EKV_HIP_GRANULARITY): the minimum of 4 KiB is rounded up to bigger pages
 *   behind one's back, and each handle costs a file descriptor (rocm-systems issue 10604, pull request 9360);
 * - access is set mapping by mapping, again when it is refused, then over the run of mappings that ends there
 *   (rocm-systems issues 2516 and 2667, pull request 6977, llama.cpp pull request 23900);
 * - a reservation is retried without an alignment (vLLM pull request 43022);
 * - where the memory of an empty reservation has not come back, its address range is freed and taken again
 *   (legacy-rocm-build issue 6021). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "internal.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    } alloc_flags;
} allocation_prop;

typedef struct {
    location location;
    int flags; /* 3: read and write */
} access_desc;

_Static_assert(sizeof(allocation_prop) == 32 && offsetof(allocation_prop, alloc_flags) == 24, "hipMemAllocationProp");
_Static_assert(sizeof(access_desc) == 12 && offsetof(access_desc, flags) == 8, "hipMemAccessDesc");

enum {
    HIP_ERROR_INVALID_VALUE = 1,
    HIP_ERROR_OUT_OF_MEMORY = 2,
    HIP_ERROR_INVALID_DEVICE = 101,
    VMM_SUPPORTED = 89, /* hipDeviceAttributeVirtualMemoryManagementSupported */
    STREAM_NON_BLOCKING = 1,
    CAPTURE_MODE_RELAXED = 2,
    TYPE_FD = 1,
    TYPE_FABRIC = 8,
    ACCESS_ATTEMPTS = 6,
    RESERVE_ATTEMPTS = 4
};

#define DEFAULT_GRANULE (2ull << 20)

/* symbol, member, parameters */
#define SYMBOLS(X)                                                                                                   \
    X(hipGetDeviceCount, get_device_count, (int *))                                                                  \
    X(hipGetDevice, get_device, (int *))                                                                             \
    X(hipSetDevice, set_device, (int))                                                                               \
    X(hipDeviceGetAttribute, device_get_attribute, (int *, int, int))                                                \
    X(hipDeviceSynchronize, device_synchronize, (void))                                                              \
    X(hipThreadExchangeStreamCaptureMode, exchange_capture_mode, (int *))                                            \
    X(hipStreamCreateWithFlags, stream_create, (void **, unsigned))                                                  \
    X(hipStreamSynchronize, stream_synchronize, (void *))                                                            \
    X(hipStreamGetCaptureInfo, stream_capture_info, (void *, int *, unsigned long long *))                           \
    X(hipMemGetAllocationGranularity, granularity, (size_t *, const allocation_prop *, int))                         \
    X(hipMemAddressReserve, address_reserve, (void **, size_t, size_t, void *, unsigned long long))                  \
    X(hipMemAddressFree, address_free, (void *, size_t))                                                             \
    X(hipMemCreate, create, (ekv_handle *, size_t, const allocation_prop *, unsigned long long))                     \
    X(hipMemRelease, release, (ekv_handle))                                                                          \
    X(hipMemMap, map, (void *, size_t, size_t, ekv_handle, unsigned long long))                                      \
    X(hipMemUnmap, unmap, (void *, size_t))                                                                          \
    X(hipMemSetAccess, set_access, (void *, size_t, const access_desc *, size_t))                                    \
    X(hipMemsetAsync, memset_async, (void *, int, size_t, void *))                                                   \
    X(hipMemExportToShareableHandle, export_handle, (void *, ekv_handle, int, unsigned long long))                   \
    X(hipMemImportFromShareableHandle, import_handle, (ekv_handle *, void *, int))                                   \
    X(hipMalloc, alloc, (void **, size_t))                                                                           \
    X(hipFree, free, (void *))                                                                                       \
    X(hipMemGetInfo, get_info, (size_t *, size_t *))                                                                 \
    X(hipGetLastError, get_last_error, (void))

static struct {
    void *library;
    const char *(*error_name)(int);
#define MEMBER(symbol, member, parameters) int (*member) parameters;
    SYMBOLS(MEMBER)
#undef MEMBER
} hip;

/* One driver call, recorded when it fails. */
#define CALL(device, symbol, address, size, expression) check(device, #symbol, hip.expression, address, size)

static int check(ekv_device *device, const char *call, int code, uint64_t address, uint64_t size)
{
    if (!code)
        return 0;
    hip.get_last_error();
    return ekv_fail(device, call, code, address, size);
}

/* A call that may fail: neither recorded nor left in the last error. */
static int quietly(int code)
{
    if (code)
        hip.get_last_error();
    return code;
}

static const char *hip_error_name(int code)
{
    const char *name = hip.error_name ? hip.error_name(code) : NULL;
    return name ? name : "unknown error";
}

static int load(void)
{
    const char *path = getenv("EKV_HIP_LIBRARY");
    void *library;
    if (hip.library)
        return 0;
    library = dlopen(path && *path ? path : "libamdhip64.so", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return ekv_error(EKV_UNSUPPORTED, "hip: %s", dlerror());
#define LOAD(symbol, member, parameters)                                                                             \
    *(void **)&hip.member = dlsym(library, #symbol);                                                                 \
    if (!hip.member) {                                                                                               \
        dlclose(library);                                                                                            \
        return ekv_error(EKV_UNSUPPORTED, "hip: the runtime library has no %s: it is older than ROCm 5.5", #symbol); \
    }
    SYMBOLS(LOAD)
#undef LOAD
    *(void **)&hip.error_name = dlsym(library, "hipGetErrorName");
    hip.library = library;
    return 0;
}

typedef struct {
    int capture_mode, caller;
    bool switched, exchanged;
} scope;

static int enter(ekv_device *device, scope *s)
{
    int code;
    *s = (scope){.capture_mode = CAPTURE_MODE_RELAXED};
    code = CALL(device, hipGetDevice, 0, 0, get_device(&s->caller));
    if (!code && s->caller != device->ordinal) {
        code = CALL(device, hipSetDevice, 0, 0, set_device(device->ordinal));
        s->switched = !code;
    }
    if (!code)
        s->exchanged = !quietly(hip.exchange_capture_mode(&s->capture_mode));
    return code;
}

/* The caller's state must come back: a refusal is answered by asking once more. */
static void leave(scope *s)
{
    if (s->exchanged && quietly(hip.exchange_capture_mode(&s->capture_mode)))
        quietly(hip.exchange_capture_mode(&s->capture_mode));
    if (s->switched && quietly(hip.set_device(s->caller)))
        quietly(hip.set_device(s->caller));
}

/* One driver call with its device current. */
#define ON_DEVICE(device, symbol, address, size, expression)                                                         \
    do {                                                                                                             \
        scope s;                                                                                                     \
        int code = enter(device, &s);                                                                                \
        if (!code)                                                                                                   \
            code = CALL(device, symbol, address, size, expression);                                                  \
        leave(&s);                                                                                                   \
        return code;                                                                                                 \
    } while (0)

static int create_stream(ekv_device *device)
{
    ON_DEVICE(device, hipStreamCreateWithFlags, 0, 0, stream_create(&device->stream, STREAM_NON_BLOCKING));
}

static int hip_open(ekv_device *device)
{
    int count = 0, supported = 1, code = load();
    if (!code)
        code = CALL(device, hipGetDeviceCount, 0, 0, get_device_count(&count));
    if (!code && (device->ordinal < 0 || device->ordinal >= count))
        code = ekv_fail(device, "hipGetDeviceCount", HIP_ERROR_INVALID_DEVICE, 0, 0);
    if (!code && quietly(hip.device_get_attribute(&supported, VMM_SUPPORTED, device->ordinal)))
        supported = 1; /* the query is newer than the calls: trying them tells */
    if (!code && !supported)
        code = ekv_error(EKV_UNSUPPORTED, "hip: device %d has no virtual memory management", device->ordinal);
    if (!code)
        code = create_stream(device);
    return code;
}

static allocation_prop properties(const ekv_device *device, int handle_kind)
{
    allocation_prop prop;
    memset(&prop, 0, sizeof prop);
    prop.type = 1;
    prop.location = (location){1, device->ordinal};
    if (handle_kind == EKV_HANDLE_FABRIC)
        prop.requested_handle_types = TYPE_FABRIC;
    else if (handle_kind != EKV_HANDLE_NONE)
        prop.requested_handle_types = TYPE_FD;
    prop.alloc_flags.gpu_direct_rdma_capable = handle_kind == EKV_HANDLE_FD_RDMA || handle_kind == EKV_HANDLE_FABRIC;
    return prop;
}

static int hip_granularity(ekv_device *device, int handle_kind, bool recommended, uint64_t *granularity)
{
    const char *text = getenv("EKV_HIP_GRANULARITY");
    uint64_t least = text && *text ? strtoull(text, NULL, 10) : DEFAULT_GRANULE;
    allocation_prop prop = properties(device, handle_kind);
    size_t bytes = 0;
    int code;
    (void)recommended;
    code = CALL(device, hipMemGetAllocationGranularity, 0, 0, granularity(&bytes, &prop, 1));
    *granularity = bytes ? (least + bytes - 1) / bytes * bytes : least; /* a multiple of what the runtime asks for */
    if (*granularity < bytes)
        *granularity = bytes;
    return code;
}

/* What the driver has to remember of its reservations and handles.  Nothing is allocated between creating a handle and
 * releasing it, so that undoing cannot run out of memory. */
typedef struct range {
    uint64_t address, size;
    size_t num_handles;  /* live ones that are mapped here, or were last */
    size_t num_mapped;
    uint64_t free_before, given_back; /* since the range became empty */
    bool lost; /* somebody else took the addresses while they were free */
    struct range *next;
} range;

typedef struct backing {
    ekv_handle handle;
    uint64_t size, address; /* address 0: not mapped */
    range *range;
    struct backing *next;
} backing;

static range *ranges;
static backing *backings;

static range *range_at(uint64_t address)
{
    range *each = ranges;
    while (each && !(address >= each->address && address < each->address + each->size))
        each = each->next;
    return each;
}

static backing *backing_of(ekv_handle handle)
{
    backing *each = backings;
    while (each && each->handle != handle)
        each = each->next;
    return each;
}

static backing *backing_at(uint64_t address)
{
    backing *each = backings;
    while (each && each->address != address)
        each = each->next;
    return each;
}

static backing *backing_before(uint64_t address)
{
    backing *each = backings;
    while (each && !(each->address && each->address + each->size == address))
        each = each->next;
    return each;
}

static int reserve_at(uint64_t size, uint64_t alignment, uint64_t hint, uint64_t *address)
{
    void *base = NULL;
    int code = quietly(hip.address_reserve(&base, size, alignment, (void *)hint, 0));
    if (code == HIP_ERROR_INVALID_VALUE && alignment)
        code = quietly(hip.address_reserve(&base, size, 0, (void *)hint, 0));
    *address = (uint64_t)base;
    if (!code && alignment && *address % alignment) {
        quietly(hip.address_free(base, size));
        code = HIP_ERROR_INVALID_VALUE;
    }
    return code;
}

static int hip_reserve(ekv_device *device, uint64_t size, uint64_t alignment, uint64_t *address)
{
    range *added = calloc(1, sizeof *added);
    scope s;
    int code;
    if (!added)
        return ekv_fail(device, "malloc", HIP_ERROR_OUT_OF_MEMORY, 0, sizeof *added);
    code = enter(device, &s);
    if (!code) {
        code = reserve_at(size, alignment, 0, address);
        if (code)
            ekv_fail(device, "hipMemAddressReserve", code, 0, size);
    }
    leave(&s);
    if (code) {
        free(added);
        return code;
    }
    *added = (range){.address = *address, .size = size, .next = ranges};
    ranges = added;
    return 0;
}

static void take_again(range *r)
{
    uint64_t address = 0;
    for (int i = 0; i < RESERVE_ATTEMPTS && r->lost; i++) {
        if (reserve_at(r->size, 0, r->address, &address))
            continue;
        r->lost = address != r->address;
        if (r->lost)
            quietly(hip.address_free((void *)address, r->size));
    }
}

/* The last handle of an empty reservation was released: see whether its memory came back. */
static void see_memory_come_back(range *r)
{
    size_t free_bytes = 0, total_bytes;
    bool held = !quietly(hip.get_info(&free_bytes, &total_bytes)) &&
                (free_bytes < r->free_before || free_bytes - r->free_before < r->given_back / 2);
    r->given_back = 0;
    if (!held || quietly(hip.address_free((void *)r->address, r->size)))
        return;
    r->lost = true;
    take_again(r);
}

/* A handle that is new here: created where prop is given, imported from file where it is not. */
static int take_handle(ekv_device *device, const allocation_prop *prop, int file, uint64_t size, ekv_handle *handle)
{
    backing *added = calloc(1, sizeof *added);
    scope s;
    int code;
    if (!added)
        return ekv_fail(device, "malloc", HIP_ERROR_OUT_OF_MEMORY, 0, sizeof *added);
    code = enter(device, &s);
    if (!code && prop)
        code = CALL(device, hipMemCreate, 0, size, create(handle, size, prop, 0));
    else if (!code)
        code = CALL(device, hipMemImportFromShareableHandle, 0, size,
                    import_handle(handle, (void *)(intptr_t)file, TYPE_FD));
    leave(&s);
    if (code) {
        free(added);
        return code;
    }
    *added = (backing){.handle = *handle, .size = size, .next = backings};
    backings = added;
    return 0;
}

static int hip_create(ekv_device *device, int handle_kind, uint64_t size, ekv_handle *handle)
{
    allocation_prop prop = properties(device, handle_kind);
    return take_handle(device, &prop, -1, size, handle);
}

static int hip_import_file(ekv_device *device, int file, uint64_t size, ekv_handle *handle)
{
    return take_handle(device, NULL, file, size, handle);
}

static int hip_export_file(ekv_device *device, ekv_handle handle, int *file)
{
    ON_DEVICE(device, hipMemExportToShareableHandle, 0, 0, export_handle(file, handle, TYPE_FD, 0));
}

static int hip_map(ekv_device *device, uint64_t address, uint64_t size, ekv_handle handle)
{
    backing *item = backing_of(handle);
    range *target = range_at(address);
    scope s;
    int code = enter(device, &s);
    if (!code && target->lost) {
        take_again(target);
        if (target->lost)
            code = ekv_error(EKV_DRIVER_FAILED,
                             "hip: the addresses from 0x%llx on, %llu bytes, were freed to give their memory back, and "
                             "something else in this process has taken them",
                             (unsigned long long)target->address, (unsigned long long)target->size);
    }
    if (!code)
        code = CALL(device, hipMemMap, address, size, map((void *)address, size, 0, handle, 0));
    leave(&s);
    if (code)
        return code;
    if (item->range != target) {
        if (item->range)
            item->range->num_handles--;
        target->num_handles++;
    }
    target->num_mapped++;
    item->range = target;
    item->address = address;
    return 0;
}

static int set_access_of(ekv_device *device, const backing *item)
{
    access_desc access = {{1, device->ordinal}, 3};
    uint64_t begin = item->address, end = item->address + item->size;
    int code = 0;
    for (int i = 0; i < ACCESS_ATTEMPTS; i++) {
        code = quietly(hip.set_access((void *)begin, item->size, &access, 1));
        if (code != HIP_ERROR_INVALID_VALUE)
            break;
        usleep(500u << i);
    }
    if (code == HIP_ERROR_INVALID_VALUE) {
        for (backing *before = backing_before(begin); before && before->range == item->range;
             before = backing_before(begin))
            begin = before->address;
        code = quietly(hip.set_access((void *)begin, end - begin, &access, 1));
    }
    return code ? ekv_fail(device, "hipMemSetAccess", code, item->address, item->size) : 0;
}

static int hip_set_access(ekv_device *device, uint64_t address, uint64_t size)
{
    scope s;
    int code = enter(device, &s);
    for (uint64_t at = address; !code && at < address + size;) {
        const backing *item = backing_at(at);
        code = set_access_of(device, item);
        at += item->size;
    }
    leave(&s);
    return code;
}

static int hip_unmap(ekv_device *device, uint64_t address, uint64_t size)
{
    backing *item = backing_at(address);
    scope s;
    int code = enter(device, &s);
    if (!code)
        code = CALL(device, hipMemUnmap, address, size, unmap((void *)address, size));
    if (!code) {
        size_t total_bytes, free_bytes = 0;
        item->address = 0;
        if (--item->range->num_mapped == 0) {
            item->range->given_back = 0;
            item->range->free_before = quietly(hip.get_info(&free_bytes, &total_bytes)) ? 0 : free_bytes;
        }
    }
    leave(&s);
    return code;
}

static int hip_release(ekv_device *device, ekv_handle handle, uint64_t size)
{
    backing *item = backing_of(handle), **link = &backings;
    scope s;
    int code = enter(device, &s);
    if (!code)
        code = CALL(device, hipMemRelease, 0, size, release(handle));
    if (!code) {
        range *r = item->range;
        while (*link != item)
            link = &(*link)->next;
        *link = item->next;
        free(item);
        if (r) {
            r->given_back += size;
            if (--r->num_handles == 0)
                see_memory_come_back(r);
        }
    }
    leave(&s);
    return code;
}

static int hip_unreserve(ekv_device *device, uint64_t address, uint64_t size)
{
    range *gone = range_at(address), **link = &ranges;
    scope s;
    int code = enter(device, &s);
    if (!code && !gone->lost)
        code = CALL(device, hipMemAddressFree, address, size, address_free((void *)address, size));
    leave(&s);
    if (code)
        return code;
    while (*link != gone)
        link = &(*link)->next;
    *link = gone->next;
    free(gone);
    return 0;
}

static int hip_zero(ekv_device *device, uint64_t address, uint64_t size)
{
    ON_DEVICE(device, hipMemsetAsync, address, size, memset_async((void *)address, 0, size, device->stream));
}

static int hip_zero_wait(ekv_device *device)
{
    ON_DEVICE(device, hipStreamSynchronize, 0, 0, stream_synchronize(device->stream));
}

static int hip_stream_wait(ekv_device *device, void *stream)
{
    ON_DEVICE(device, hipStreamSynchronize, 0, 0, stream_synchronize(stream));
}

static int hip_capture_id(ekv_device *device, void *stream, uint64_t *id)
{
    unsigned long long capture = 0;
    int capturing = 0;
    scope s;
    int code = enter(device, &s);
    if (!code)
        code = CALL(device, hipStreamGetCaptureInfo, 0, 0, stream_capture_info(stream, &capturing, &capture));
    leave(&s);
    *id = !code && capturing ? capture : 0;
    return code;
}

static int hip_synchronize(ekv_device *device) { ON_DEVICE(device, hipDeviceSynchronize, 0, 0, device_synchronize()); }

static int hip_memory_info(ekv_device *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    ON_DEVICE(device, hipMemGetInfo, 0, 0, get_info((size_t *)free_bytes, (size_t *)total_bytes));
}

/* HIP has no attribute that tells: nothing is claimed. */
static int hip_gpu_direct_rdma(ekv_device *device, bool *capable)
{
    (void)device;
    *capable = false;
    return 0;
}

static int hip_allocate(ekv_device *device, uint64_t size, uint64_t *address)
{
    ON_DEVICE(device, hipMalloc, 0, size, alloc((void **)address, size));
}

static int hip_free(ekv_device *device, uint64_t address)
{
    ON_DEVICE(device, hipFree, address, 0, free((void *)address));
}

const ekv_driver ekv_hip_driver = {
    .name = "hip",
    .kind = EKV_HIP,
    .out_of_memory_code = HIP_ERROR_OUT_OF_MEMORY,
    .fresh_memory_is_zero = false,
    .open = hip_open,
    .granularity = hip_granularity,
    .reserve = hip_reserve,
    .create = hip_create,
    .map = hip_map,
    .set_access = hip_set_access,
    .unmap = hip_unmap,
    .release = hip_release,
    .unreserve = hip_unreserve,
    .zero = hip_zero,
    .zero_wait = hip_zero_wait,
    .stream_wait = hip_stream_wait,
    .capture_id = hip_capture_id,
    .synchronize = hip_synchronize,
    .memory_info = hip_memory_info,
    .gpu_direct_rdma = hip_gpu_direct_rdma,
    .export_file = hip_export_file,
    .import_file = hip_import_file,
    .allocate = hip_allocate,
    .free = hip_free,
    .error_name = hip_error_name,
};
