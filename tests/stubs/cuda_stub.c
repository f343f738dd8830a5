/* A stub libcuda.so.1: the driver API's symbols, under the names that the library exports, over the simulated devices.
 *
 * Signatures, values and layouts: cuda.h of CUDA 13.0.  tests/c/cuda_abi.c compares this file's idea of them with that
 * header where it is installed. */
#include "cuda_stub.h"
#include "cuda_types.h"

#include <stdio.h>
#include <string.h>

/* A context is the address of one of these. */
static char contexts[SIM_DEVICES];
static int context_device(const void *context)
{
    for (int device = 0; device < SIM_DEVICES; device++)
        if (context == &contexts[device])
            return device;
    return -1;
}

static int check_device(int device)
{
    return device >= 0 && device < SIM_DEVICES ? SIM_OK
                                               : sim_violation(SIM_INVALID_DEVICE, "device %d does not exist", device);
}

static int initialize(unsigned flags)
{
    if (flags)
        return sim_violation(SIM_INVALID_VALUE, "flags must be 0");
    sim.initialized = true;
    return SIM_OK;
}
SIM_EXPORT int cuInit(unsigned flags) { CALL(0, initialize(flags)); }

static int set_int(int *out, int value)
{
    *out = value;
    return SIM_OK;
}
SIM_EXPORT int cuDriverGetVersion(int *version) { CALL(0, set_int(version, 13000)); }
SIM_EXPORT int cuDeviceGetCount(int *count) { CALL(SIM_NEEDS_INIT, set_int(count, SIM_DEVICES)); }

static int get_device(int *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= SIM_DEVICES)
        return SIM_INVALID_DEVICE; /* a way to ask which devices exist: no misuse */
    return set_int(device, ordinal);
}
SIM_EXPORT int cuDeviceGet(int *device, int ordinal) { CALL(SIM_NEEDS_INIT, get_device(device, ordinal)); }

static int get_name(char *name, int length, int device)
{
    int code = check_device(device);
    if (!code)
        snprintf(name, (size_t)length, "Stub GPU %d", device);
    return code;
}
SIM_EXPORT int cuDeviceGetName(char *name, int length, int device)
{
    CALL(SIM_NEEDS_INIT, get_name(name, length, device));
}

static int get_attribute(int *value, int attribute, int device)
{
    static const int supported[][2] = {
        {STUB_ATTRIBUTE_VMM, 1},         {STUB_ATTRIBUTE_FD, 1},     {STUB_ATTRIBUTE_RDMA_VMM, 1},
        {STUB_ATTRIBUTE_RDMA, 1},        {STUB_ATTRIBUTE_FABRIC, 0}, {STUB_ATTRIBUTE_MAJOR, 9},
        {STUB_ATTRIBUTE_MINOR, 0},
    };
    int code = check_device(device);
    for (size_t i = 0; !code && i < sizeof supported / sizeof *supported; i++)
        if (supported[i][0] == attribute)
            return sim_attribute(attribute, value, supported[i][1]);
    return code ? code : sim_attribute(attribute, value, 0);
}
SIM_EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    CALL(SIM_NEEDS_INIT, get_attribute(value, attribute, device));
}

/* Contexts. */
static int retain_context(void **context, int device)
{
    int code = check_device(device);
    if (code)
        return code;
    sim.devices[device].context_references++;
    *context = &contexts[device];
    return SIM_OK;
}
SIM_EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    CALL(SIM_NEEDS_INIT | SIM_UNSAFE_IN_CAPTURE, retain_context(context, device));
}

static int release_context(int device)
{
    int code = check_device(device);
    if (code)
        return code;
    if (!sim.devices[device].context_references)
        return sim_violation(SIM_INVALID_CONTEXT, "released a context that is not held");
    sim.devices[device].context_references--;
    return SIM_OK;
}
SIM_EXPORT int cuDevicePrimaryCtxRelease_v2(int device) { CALL(SIM_NEEDS_INIT, release_context(device)); }

static int push_context(const void *context)
{
    sim_thread *thread = sim_this_thread();
    int device = context_device(context);
    if (device < 0 || !sim.devices[device].context_references)
        return sim_violation(SIM_INVALID_CONTEXT, "pushed a context that does not exist");
    if (thread->depth == sizeof thread->stack / sizeof *thread->stack)
        return sim_violation(SIM_INVALID_CONTEXT, "pushed %d contexts", thread->depth);
    thread->stack[thread->depth++] = device;
    thread->pushes++;
    return SIM_OK;
}
SIM_EXPORT int cuCtxPushCurrent_v2(void *context) { CALL(SIM_NEEDS_INIT, push_context(context)); }

static int pop_context(void **context)
{
    sim_thread *thread = sim_this_thread();
    if (!thread->depth)
        return sim_violation(SIM_INVALID_CONTEXT, "popped from an empty stack");
    thread->depth--;
    thread->pushes--;
    if (context)
        *context = &contexts[thread->stack[thread->depth]];
    return SIM_OK;
}
SIM_EXPORT int cuCtxPopCurrent_v2(void **context) { CALL(SIM_NEEDS_INIT, pop_context(context)); }

/* Replaces the top, so that a test can play the application. */
static int set_context(const void *context)
{
    sim_thread *thread = sim_this_thread();
    int device = context ? context_device(context) : -1;
    if (context && (device < 0 || !sim.devices[device].context_references))
        return sim_violation(SIM_INVALID_CONTEXT, "made current a context that does not exist");
    if (thread->depth)
        thread->depth--;
    if (context)
        thread->stack[thread->depth++] = device;
    return SIM_OK;
}
SIM_EXPORT int cuCtxSetCurrent(void *context) { CALL(SIM_NEEDS_INIT, set_context(context)); }

static int get_context(void **context)
{
    int device = sim_current_device();
    *context = device < 0 ? NULL : &contexts[device];
    return SIM_OK;
}
SIM_EXPORT int cuCtxGetCurrent(void **context) { CALL(SIM_NEEDS_INIT, get_context(context)); }
SIM_EXPORT int cuCtxGetDevice(int *device) { CALL(DEVICE, set_int(device, sim_current_device())); }
SIM_EXPORT int cuCtxSynchronize(void)
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
SIM_EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { CALL(SIM_NEEDS_INIT, exchange_capture_mode(mode)); }

/* Streams and work. */
SIM_EXPORT int cuStreamCreate(uint64_t *stream, unsigned flags)
{
    CALL(MEMORY, flags > 1 ? sim_violation(SIM_INVALID_VALUE, "stream flags %u", flags)
                           : sim_stream_create(stream, flags == 1));
}
SIM_EXPORT int cuStreamDestroy_v2(uint64_t stream) { CALL(DEVICE, sim_stream_destroy(stream)); }
SIM_EXPORT int cuStreamSynchronize(uint64_t stream)
{
    CALL(DEVICE | (stream ? SIM_UNSAFE_IN_CAPTURE : SIM_FORBIDDEN_IN_CAPTURE), sim_stream_wait(stream));
}
/* Every stream but the default one takes part in the stub's capture. */
static int capture_info(uint64_t stream, int *status, uint64_t *id)
{
    *status = sim.capturing && stream;
    if (*status)
        *id = sim.capture;
    return SIM_OK;
}
SIM_EXPORT int cuStreamGetCaptureInfo_v2(uint64_t stream, int *status, uint64_t *id, void *graph, void *dependencies,
                                         size_t *num_dependencies)
{
    CALL(DEVICE, graph || dependencies || num_dependencies
                     ? sim_violation(SIM_INVALID_VALUE, "the stub knows no graphs")
                     : capture_info(stream, status, id));
}
SIM_EXPORT int cuMemsetD8_v2(device_pointer to, unsigned char value, size_t size)
{
    CALL(MEMORY, sim_fill(to, value, size, 0));
}
SIM_EXPORT int cuMemsetD8Async(device_pointer to, unsigned char value, size_t size, uint64_t stream)
{
    CALL(DEVICE, sim_fill(to, value, size, stream));
}
SIM_EXPORT int cuMemcpyDtoD_v2(device_pointer to, device_pointer from, size_t size)
{
    CALL(MEMORY, sim_copy(to, from, size, 0));
}
SIM_EXPORT int cuMemcpyDtoDAsync_v2(device_pointer to, device_pointer from, size_t size, uint64_t stream)
{
    CALL(DEVICE, sim_copy(to, from, size, stream));
}
SIM_EXPORT int cuMemcpyDtoH_v2(void *to, device_pointer from, size_t size)
{
    CALL(MEMORY, sim_copy_host(to, from, size, true));
}
SIM_EXPORT int cuMemcpyHtoD_v2(device_pointer to, const void *from, size_t size)
{
    CALL(MEMORY, sim_copy_host((void *)(uintptr_t)from, to, size, false));
}

/* Plain memory. */
SIM_EXPORT int cuMemAlloc_v2(device_pointer *address, size_t size) { CALL(MEMORY, sim_allocate(address, size)); }
SIM_EXPORT int cuMemFree_v2(device_pointer address) { CALL(MEMORY, address ? sim_free(address) : SIM_OK); }
SIM_EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { CALL(DEVICE, sim_memory_info(free_bytes, total)); }

/* Virtual memory. */
static int check_prop(const stub_prop *prop)
{
    if (!prop || prop->type != 1 || prop->location.type != 1)
        return sim_violation(SIM_INVALID_VALUE, "properties are not pinned memory of a device");
    if (prop->win32 || prop->compression || prop->usage || memcmp(prop->reserved, "\0\0\0\0", 4))
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
SIM_EXPORT int cuMemGetAllocationGranularity(size_t *out, const stub_prop *prop, int option)
{
    CALL(SIM_NEEDS_INIT, granularity(out, prop, option));
}
SIM_EXPORT int cuMemAddressReserve(device_pointer *address, size_t size, size_t alignment, device_pointer hint,
                                   uint64_t flags)
{
    CALL(MEMORY, flags ? sim_violation(SIM_INVALID_VALUE, "flags must be 0")
                       : sim_reserve(address, size, alignment, hint));
}
SIM_EXPORT int cuMemAddressFree(device_pointer address, size_t size) { CALL(MEMORY, sim_unreserve(address, size)); }

static int create(uint64_t *handle, size_t size, const stub_prop *prop, uint64_t flags)
{
    int code = flags ? sim_violation(SIM_INVALID_VALUE, "flags must be 0") : check_prop(prop);
    if (code)
        return code;
    if (prop->location.id != sim_current_device())
        sim_violation(SIM_INVALID_CONTEXT, "memory of device %d created with device %d current", prop->location.id,
                      sim_current_device());
    return sim_create(handle, size, prop->location.id, (unsigned)prop->handle_types, prop->rdma);
}
SIM_EXPORT int cuMemCreate(uint64_t *handle, size_t size, const stub_prop *prop, uint64_t flags)
{
    CALL(MEMORY, create(handle, size, prop, flags));
}
SIM_EXPORT int cuMemRelease(uint64_t handle) { CALL(MEMORY, sim_release(handle)); }
SIM_EXPORT int cuMemMap(device_pointer address, size_t size, size_t offset, uint64_t handle, uint64_t flags)
{
    CALL(MEMORY, flags ? sim_violation(SIM_INVALID_VALUE, "flags must be 0") : sim_map(address, size, offset, handle));
}
SIM_EXPORT int cuMemUnmap(device_pointer address, size_t size) { CALL(MEMORY, sim_unmap(address, size)); }

static int set_access(device_pointer address, size_t size, const stub_access *access, size_t count)
{
    int code = access && count ? SIM_OK : sim_violation(SIM_INVALID_VALUE, "no access descriptor");
    for (size_t i = 0; !code && i < count; i++)
        code = access[i].location.type == 1
                   ? sim_set_access(address, size, access[i].location.id, (unsigned)access[i].flags)
                   : sim_violation(SIM_INVALID_VALUE, "access for location type %d", access[i].location.type);
    return code;
}
SIM_EXPORT int cuMemSetAccess(device_pointer address, size_t size, const stub_access *access, size_t count)
{
    CALL(MEMORY, set_access(address, size, access, count));
}
SIM_EXPORT int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, uint64_t flags)
{
    CALL(MEMORY, flags ? sim_violation(SIM_INVALID_VALUE, "flags must be 0") : sim_export(handle, (unsigned)type, out));
}
SIM_EXPORT int cuMemImportFromShareableHandle(uint64_t *handle, void *shareable, int type)
{
    CALL(MEMORY, sim_import(handle, (unsigned)type, shareable));
}
SIM_EXPORT int cuMemRetainAllocationHandle(uint64_t *handle, void *address)
{
    CALL(MEMORY, sim_retain(handle, (uint64_t)address));
}
