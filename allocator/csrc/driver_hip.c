/* HIP driver: the table, and the calls that need nothing but the call.  See hip.h and hip_memory.c. */
#include "hip.h"

#include <stdlib.h>

#define DEFAULT_GRANULE (2ull << 20)

static int create_stream(ekv_device *device)
{
    ON_DEVICE(device, hipStreamCreateWithFlags, 0, 0, stream_create(&device->stream, STREAM_NON_BLOCKING));
}

static int hip_open(ekv_device *device)
{
    int count = 0, supported = 1, code = ekv_hip_load();
    if (!code)
        code = CALL(device, hipGetDeviceCount, 0, 0, get_device_count(&count));
    if (!code && (device->ordinal < 0 || device->ordinal >= count))
        code = ekv_fail(device, "hipGetDeviceCount", HIP_ERROR_INVALID_DEVICE, 0, 0);
    if (!code && ekv_hip_quietly(ekv_hip.device_get_attribute(&supported, VMM_SUPPORTED, device->ordinal)))
        supported = 1; /* the query is newer than the calls: trying them tells */
    if (!code && !supported)
        code = ekv_error(EKV_UNSUPPORTED, "hip: device %d has no virtual memory management", device->ordinal);
    if (!code)
        code = create_stream(device);
    return code;
}

static int hip_granularity(ekv_device *device, int handle_kind, bool recommended, uint64_t *granularity)
{
    const char *text = getenv("EKV_HIP_GRANULARITY");
    uint64_t least = text && *text ? strtoull(text, NULL, 10) : DEFAULT_GRANULE;
    ekv_hip_prop prop = ekv_hip_properties(device, handle_kind);
    size_t bytes = 0;
    int code;
    (void)recommended;
    code = CALL(device, hipMemGetAllocationGranularity, 0, 0, granularity(&bytes, &prop, 1));
    *granularity = bytes ? (least + bytes - 1) / bytes * bytes : least; /* a multiple of what the runtime asks for */
    if (*granularity < bytes)
        *granularity = bytes;
    return code;
}

static int hip_export_file(ekv_device *device, ekv_handle handle, int *file)
{
    ON_DEVICE(device, hipMemExportToShareableHandle, 0, 0, export_handle(file, handle, TYPE_FD, 0));
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
    ekv_hip_scope s;
    int code = ekv_hip_enter(device, &s);
    if (!code)
        code = CALL(device, hipStreamGetCaptureInfo, 0, 0, stream_capture_info(stream, &capturing, &capture));
    ekv_hip_leave(&s);
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
    .reserve = ekv_hip_reserve,
    .create = ekv_hip_create,
    .map = ekv_hip_map,
    .set_access = ekv_hip_set_access,
    .unmap = ekv_hip_unmap,
    .release = ekv_hip_release,
    .unreserve = ekv_hip_unreserve,
    .zero = hip_zero,
    .zero_wait = hip_zero_wait,
    .stream_wait = hip_stream_wait,
    .capture_id = hip_capture_id,
    .synchronize = hip_synchronize,
    .memory_info = hip_memory_info,
    .gpu_direct_rdma = hip_gpu_direct_rdma,
    .export_file = hip_export_file,
    .import_file = ekv_hip_import_file,
    .allocate = hip_allocate,
    .free = hip_free,
    .error_name = ekv_hip_error_name,
};
