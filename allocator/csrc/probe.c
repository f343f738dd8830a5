/* What a driver can do, found out by doing it on one granule. */
#include "internal.h"

#include <string.h>

int ekv_trial_end(ekv_device *device)
{
    const ekv_driver *driver = device->driver;
    ekv_trial *t = &device->trial;
    int first = 0, code;
    if (t->mapped) {
        first = driver->unmap(device, t->address, t->size);
        t->mapped = first;
    }
    if (t->created && !t->mapped) {
        code = driver->release(device, t->handle, t->size);
        t->created = code;
        first = first ? first : code;
    }
    if (t->reserved && !t->mapped) {
        code = driver->unreserve(device, t->address, t->size);
        t->reserved = code;
        first = first ? first : code;
    }
    return first;
}

static int try_backing(ekv_device *device, uint64_t granularity)
{
    const ekv_driver *driver = device->driver;
    ekv_trial *t = &device->trial;
    if (ekv_trial_end(device))
        return ekv_error_status();
    t->size = granularity;
    t->reserved = !driver->reserve(device, granularity, granularity, &t->address);
    if (t->reserved)
        t->created = !driver->create(device, EKV_HANDLE_NONE, granularity, &t->handle);
    if (t->created)
        t->mapped = !driver->map(device, t->address, granularity, t->handle);
    if (t->mapped && !driver->set_access(device, t->address, granularity) &&
        !driver->zero(device, t->address, granularity) && driver->zero_wait(device))
        driver->synchronize(device); /* nothing may be unmapped while it is being zeroed */
    if (ekv_trial_end(device))
        ekv_trial_end(device);
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
