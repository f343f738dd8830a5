/* A stub libamdhip64.so over the simulated devices.  HIP has no context stack: each thread has a current device, 0 at
 * first, and each failure stays in the thread's last error until it is fetched, where PyTorch would find it. */
#include "hip_types.h"
#include "vmm_sim.h"

#include <stdio.h>

#define DEVICE (SIM_NEEDS_INIT | SIM_NEEDS_CONTEXT)
#define MEMORY (DEVICE | SIM_UNSAFE_IN_CAPTURE)
#define CALL(needs, action)                                                                                            \
    do {                                                                                                               \
        int code_;                                                                                                     \
        start_thread();                                                                                                \
        code_ = sim_enter(__func__, needs);                                                                            \
        if (!code_)                                                                                                    \
            code_ = (action);                                                                                          \
        if (code_)                                                                                                     \
            last_error = code_;                                                                                        \
        return sim_leave(code_);                                                                                       \
    } while (0)

static _Thread_local int last_error;

static void start_thread(void)
{
    sim_thread *thread = sim_this_thread();
    if (!thread->depth)
        thread->stack[thread->depth++] = 0;
}

/* The runtime initializes itself at the first call. */
__attribute__((constructor)) static void initialize(void)
{
    sim.initialized = true;
    for (int device = 0; device < SIM_DEVICES; device++)
        sim.devices[device].context_references = 1;
}

static int check_device(int device)
{
    return device >= 0 && device < SIM_DEVICES ? SIM_OK
                                               : sim_violation(SIM_INVALID_DEVICE, "device %d does not exist", device);
}

static int set_int(int *out, int value)
{
    *out = value;
    return SIM_OK;
}

SIM_EXPORT int hipInit(unsigned flags) { CALL(0, flags ? SIM_INVALID_VALUE : SIM_OK); }
SIM_EXPORT int hipDriverGetVersion(int *version) { CALL(0, set_int(version, (int)sim_option("runtime_version"))); }
SIM_EXPORT int hipRuntimeGetVersion(int *version) { CALL(0, set_int(version, (int)sim_option("runtime_version"))); }
SIM_EXPORT int hipGetDeviceCount(int *count) { CALL(0, set_int(count, SIM_DEVICES)); }
SIM_EXPORT int hipGetDevice(int *device) { CALL(0, set_int(device, sim_current_device())); }

static int set_device(int device)
{
    if (device < 0 || device >= SIM_DEVICES)
        return SIM_INVALID_DEVICE;
    sim_this_thread()->stack[0] = device;
    return SIM_OK;
}
SIM_EXPORT int hipSetDevice(int device) { CALL(0, set_device(device)); }

static int get_attribute(int *value, int attribute, int device)
{
    int code = check_device(device);
    return code ? code : sim_attribute(attribute, value, attribute == STUB_ATTRIBUTE_VMM);
}
SIM_EXPORT int hipDeviceGetAttribute(int *value, int attribute, int device)
{
    CALL(0, get_attribute(value, attribute, device));
}

static int get_name(char *name, int length, int device)
{
    int code = check_device(device);
    if (!code)
        snprintf(name, (size_t)length, "Stub GPU %d", device);
    return code;
}
SIM_EXPORT int hipDeviceGetName(char *name, int length, int device) { CALL(0, get_name(name, length, device)); }
SIM_EXPORT int hipDeviceSynchronize(void)
{
    CALL(DEVICE | SIM_FORBIDDEN_IN_CAPTURE, sim_device_wait(sim_current_device()));
}

static int exchange_capture_mode(int *mode)
{
    sim_thread *thread = sim_this_thread();
    int previous = thread->capture_mode;
    if (*mode < 0 || *mode > 2)
        return sim_violation(SIM_INVALID_VALUE, "capture mode %d", *mode);
    thread->capture_mode = *mode;
    *mode = previous;
    return SIM_OK;
}
SIM_EXPORT int hipThreadExchangeStreamCaptureMode(int *mode) { CALL(0, exchange_capture_mode(mode)); }

/* Streams and work. */
SIM_EXPORT int hipStreamCreateWithFlags(uint64_t *stream, unsigned flags)
{
    CALL(MEMORY, flags > 1 ? sim_violation(SIM_INVALID_VALUE, "stream flags %u", flags)
                           : sim_stream_create(stream, flags == 1));
}
SIM_EXPORT int hipStreamDestroy(uint64_t stream) { CALL(DEVICE, sim_stream_destroy(stream)); }
SIM_EXPORT int hipStreamSynchronize(uint64_t stream)
{
    CALL(DEVICE | (stream ? SIM_UNSAFE_IN_CAPTURE : SIM_FORBIDDEN_IN_CAPTURE), sim_stream_wait(stream));
}
/* Every stream but the default one takes part in the stub's capture. */
static int capture_info(uint64_t stream, int *status, unsigned long long *id)
{
    *status = sim.capturing && stream;
    if (*status)
        *id = sim.capture;
    return SIM_OK;
}
SIM_EXPORT int hipStreamGetCaptureInfo(uint64_t stream, int *status, unsigned long long *id)
{
    CALL(DEVICE, capture_info(stream, status, id));
}
SIM_EXPORT int hipMemset(void *to, int value, size_t size)
{
    CALL(MEMORY, sim_fill((uint64_t)to, (unsigned char)value, size, 0));
}
SIM_EXPORT int hipMemsetAsync(void *to, int value, size_t size, uint64_t stream)
{
    CALL(DEVICE, sim_fill((uint64_t)to, (unsigned char)value, size, stream));
}
SIM_EXPORT int hipMemsetD8(void *to, unsigned char value, size_t size)
{
    CALL(MEMORY, sim_fill((uint64_t)to, value, size, 0));
}
SIM_EXPORT int hipMemsetD8Async(void *to, unsigned char value, size_t size, uint64_t stream)
{
    CALL(DEVICE, sim_fill((uint64_t)to, value, size, stream));
}
SIM_EXPORT int hipMemcpyDtoD(void *to, void *from, size_t size)
{
    CALL(MEMORY, sim_copy((uint64_t)to, (uint64_t)from, size, 0));
}
SIM_EXPORT int hipMemcpyDtoDAsync(void *to, void *from, size_t size, uint64_t stream)
{
    CALL(DEVICE, sim_copy((uint64_t)to, (uint64_t)from, size, stream));
}
SIM_EXPORT int hipMemcpyDtoH(void *to, void *from, size_t size)
{
    CALL(MEMORY, sim_copy_host(to, (uint64_t)from, size, true));
}
SIM_EXPORT int hipMemcpyHtoD(void *to, void *from, size_t size)
{
    CALL(MEMORY, sim_copy_host(from, (uint64_t)to, size, false));
}

/* Plain memory. */
static int allocate(void **address, size_t size)
{
    uint64_t out = 0;
    int code = sim_allocate(&out, size);
    *address = (void *)out;
    return code;
}
SIM_EXPORT int hipMalloc(void **address, size_t size) { CALL(MEMORY, allocate(address, size)); }
SIM_EXPORT int hipFree(void *address) { CALL(MEMORY, address ? sim_free((uint64_t)address) : SIM_OK); }
SIM_EXPORT int hipMemGetInfo(size_t *free_bytes, size_t *total) { CALL(DEVICE, sim_memory_info(free_bytes, total)); }

/* Virtual memory. */
static int check_prop(const stub_prop *prop)
{
    if (!prop || prop->type != 1 || prop->location.type != 1)
        return sim_violation(SIM_INVALID_VALUE, "properties are not pinned memory of a device");
    if (prop->win32 || prop->compression || prop->usage)
        return sim_violation(SIM_INVALID_VALUE, "properties have a field set that must be zero");
    return check_device(prop->location.id);
}

static int granularity(size_t *out, const stub_prop *prop, int option)
{
    int code = check_prop(prop);
    if (code)
        return code;
    return sim_granularity(prop->location.id, (unsigned)prop->handle_types, option == 1, out);
}
SIM_EXPORT int hipMemGetAllocationGranularity(size_t *out, const stub_prop *prop, int option)
{
    CALL(0, granularity(out, prop, option));
}

static int reserve(void **address, size_t size, size_t alignment, void *hint, uint64_t flags)
{
    uint64_t out = 0;
    int code = flags ? sim_violation(SIM_INVALID_VALUE, "flags must be 0")
                     : sim_reserve(&out, size, alignment, (uint64_t)hint);
    *address = (void *)out;
    return code;
}
SIM_EXPORT int hipMemAddressReserve(void **address, size_t size, size_t alignment, void *hint,
                                    unsigned long long flags)
{
    CALL(MEMORY, reserve(address, size, alignment, hint, flags));
}
SIM_EXPORT int hipMemAddressFree(void *address, size_t size) { CALL(MEMORY, sim_unreserve((uint64_t)address, size)); }

/* The runtime allocates on the current device's context, whatever the properties say (hip_vm.cpp, hipMemCreate). */
static int create(uint64_t *handle, size_t size, const stub_prop *prop, uint64_t flags)
{
    int code = flags ? sim_violation(SIM_INVALID_VALUE, "flags must be 0") : check_prop(prop);
    if (code)
        return code;
    if (prop->location.id != sim_current_device())
        sim_violation(SIM_INVALID_DEVICE, "memory of device %d created with device %d current", prop->location.id,
                      sim_current_device());
    return sim_create(handle, size, sim_current_device(), (unsigned)prop->handle_types, prop->rdma);
}
SIM_EXPORT int hipMemCreate(uint64_t *handle, size_t size, const stub_prop *prop, unsigned long long flags)
{
    CALL(MEMORY, create(handle, size, prop, flags));
}
SIM_EXPORT int hipMemRelease(uint64_t handle) { CALL(MEMORY, sim_release(handle)); }
SIM_EXPORT int hipMemMap(void *address, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
{
    CALL(MEMORY, flags ? sim_violation(SIM_INVALID_VALUE, "flags must be 0")
                       : sim_map((uint64_t)address, size, offset, handle));
}
SIM_EXPORT int hipMemUnmap(void *address, size_t size) { CALL(MEMORY, sim_unmap((uint64_t)address, size)); }

static int set_access(uint64_t address, size_t size, const stub_access *access, size_t count)
{
    int code = access && count ? SIM_OK : sim_violation(SIM_INVALID_VALUE, "no access descriptor");
    for (size_t i = 0; !code && i < count; i++)
        code = access[i].location.type == 1
                   ? sim_set_access(address, size, access[i].location.id, (unsigned)access[i].flags)
                   : sim_violation(SIM_INVALID_VALUE, "access for location type %d", access[i].location.type);
    return code;
}
SIM_EXPORT int hipMemSetAccess(void *address, size_t size, const stub_access *access, size_t count)
{
    CALL(MEMORY, set_access((uint64_t)address, size, access, count));
}
SIM_EXPORT int hipMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags)
{
    CALL(MEMORY, flags ? sim_violation(SIM_INVALID_VALUE, "flags must be 0") : sim_export(handle, (unsigned)type, out));
}
/* ROCm 7.1 changed what shareable is for a descriptor: its address before, its value since. */
static int import(uint64_t *handle, void *shareable, int type)
{
    bool is_value = (uintptr_t)shareable < 65536;
    if (type == SIM_HANDLE_FD && sim_option("runtime_version") < 70100000) {
        if (is_value)
            return sim_violation(SIM_INVALID_VALUE, "this runtime would have read address %p", shareable);
        shareable = (void *)(intptr_t)*(int *)shareable;
    } else if (type == SIM_HANDLE_FD && !is_value) {
        return sim_violation(SIM_INVALID_VALUE, "a descriptor passed by address");
    }
    return sim_import(handle, (unsigned)type, shareable);
}
SIM_EXPORT int hipMemImportFromShareableHandle(uint64_t *handle, void *shareable, int type)
{
    CALL(MEMORY, import(handle, shareable, type));
}
SIM_EXPORT int hipMemRetainAllocationHandle(uint64_t *handle, void *address)
{
    CALL(MEMORY, sim_retain(handle, (uint64_t)address));
}

static int address_range(void **base, size_t *size, uint64_t address)
{
    const sim_mapping *mapping = sim_find_mapping(address);
    const sim_range *range = sim_find_range(address);
    if (!mapping && !(range && range->is_allocation))
        return SIM_INVALID_VALUE;
    if (base)
        *base = (void *)(mapping ? mapping->address : range->address);
    if (size)
        *size = mapping ? mapping->size : range->size;
    return SIM_OK;
}
SIM_EXPORT int hipMemGetAddressRange(void **base, size_t *size, void *address)
{
    CALL(DEVICE, address_range(base, size, (uint64_t)address));
}

/* Errors: no lock, and callable at any time. */
SIM_EXPORT int hipPeekAtLastError(void) { return last_error; }
SIM_EXPORT int hipGetLastError(void)
{
    int code = last_error;
    last_error = SIM_OK;
    return code;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "hipSuccess", "no error"},
    {1, "hipErrorInvalidValue", "invalid argument"},
    {2, "hipErrorOutOfMemory", "out of memory"},
    {3, "hipErrorNotInitialized", "initialization error"},
    {100, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {101, "hipErrorInvalidDevice", "invalid device ordinal"},
    {201, "hipErrorInvalidContext", "invalid device context"},
    {400, "hipErrorInvalidHandle", "invalid resource handle"},
    {700, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {801, "hipErrorNotSupported", "operation not supported"},
    {900, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {906, "hipErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing stream"},
    {999, "hipErrorUnknown", "unknown error"},
};

static const char *describe(int code, bool name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return name ? errors[i].name : errors[i].text;
    return name ? "hipErrorUnknown" : "unknown error";
}
SIM_EXPORT const char *hipGetErrorName(int code) { return describe(code, true); }
SIM_EXPORT const char *hipGetErrorString(int code) { return describe(code, false); }
