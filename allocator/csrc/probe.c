/* What a driver can do, found out by doing it on one granule. */
#include "internal.h"

#include <string.h>

static int try_backing(ekv_device *device, uint64_t granularity)
{
    const ekv_driver *driver = device->driver;
    uint64_t address = 0;
    ekv_handle handle = 0;
    bool reserved, created = false, mapped = false;

    reserved = !driver->reserve(device, granularity, granularity, &address);
    if (reserved)
        created = !driver->create(device, EKV_HANDLE_NONE, granularity, &handle);
    if (created)
        mapped = !driver->map(device, address, granularity, handle);
    if (mapped && !driver->set_access(device, address, granularity) && !driver->zero(device, address, granularity) &&
        driver->zero_wait(device))
        driver->synchronize(device); /* nothing may be unmapped while it is being zeroed */
    /* Each undo step that is refused is tried once more: nobody else will. */
    if (mapped && driver->unmap(device, address, granularity))
        driver->unmap(device, address, granularity);
    if (created && driver->release(device, handle, granularity))
        driver->release(device, handle, granularity);
    if (reserved && driver->unreserve(device, address, granularity))
        driver->unreserve(device, address, granularity);
    return ekv_error_status();
}

int ekv_probe(int kind, int ordinal, ekv_probe_info *info, char *reason, size_t reason_bytes)
{
    ekv_device *device;
    ekv_error_mark mark;
    bool rdma = false;
    int status = ekv_enter();
    memset(info, 0, sizeof *info);
    if (reason_bytes)
        reason[0] = '\0';
    if (status)
        return status;
    status = ekv_device_get(kind, ordinal, &device);
    if (!status && device->driver->granularity(device, EKV_HANDLE_NONE, false, &info->granularity))
        status = ekv_error_status();
    if (!status)
        status = try_backing(device, info->granularity);
    if (!status) {
        info->virtual_memory = 1;
        mark = ekv_error_get_mark();
        if (device->driver->granularity(device, EKV_HANDLE_NONE, true, &info->recommended_granularity))
            info->recommended_granularity = info->granularity;
        if (!device->driver->gpu_direct_rdma(device, &rdma))
            info->gpu_direct_rdma = rdma;
        ekv_error_rewind(mark, NULL, 0);
        status = ekv_pick_handle_kind(device, &info->handle_kind, &info->shareable_granularity, reason, reason_bytes);
    }
    ekv_leave();
    return status;
}
