/* The process-wide state: one lock, the process that owns it, and the devices that were opened. */
#include "internal.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ekv_device *devices;
static _Atomic pid_t owner; /* the process that first opened a device; 0 before that */

/* A child that was forked after the first use must not touch the parent's mappings, nor wait for a lock that some
 * thread of the parent held at the fork: so the check comes before the lock. */
int ekv_enter(void)
{
    pid_t first = owner;
    ekv_error_clear();
    if (first && first != getpid())
        return ekv_error(EKV_FORKED,
                         "process %d was forked after process %d had used the allocator: device memory does not "
                         "survive a fork; start workers with spawn",
                         (int)getpid(), (int)first);
    pthread_mutex_lock(&lock);
    return EKV_OK;
}

void ekv_leave(void) { pthread_mutex_unlock(&lock); }

static const ekv_driver *driver_of(int kind)
{
    switch (kind) {
    case EKV_HOST:
        return &ekv_host_driver;
    case EKV_CUDA:
        return &ekv_cuda_driver;
    case EKV_HIP:
        return &ekv_hip_driver;
    default:
        return NULL;
    }
}

int ekv_device_get(int kind, int ordinal, ekv_device **out)
{
    const ekv_driver *driver = driver_of(kind);
    ekv_device *device;
    if (!driver)
        return ekv_error(EKV_INVALID, "driver %d is not one of host (0), cuda (1), hip (2)", kind);
    for (device = devices; device; device = device->next)
        if (device->driver == driver && device->ordinal == ordinal) {
            *out = device;
            return EKV_OK;
        }
    device = calloc(1, sizeof *device);
    if (!device)
        return ekv_error(EKV_OUT_OF_MEMORY, "malloc failed: %zu bytes", sizeof *device);
    device->driver = driver;
    device->ordinal = ordinal;
    owner = getpid();
    if (driver->open(device)) {
        free(device);
        if (!devices)
            owner = 0;
        return ekv_error_status();
    }
    device->next = devices;
    devices = device;
    *out = device;
    return EKV_OK;
}

int ekv_memory_info(int kind, int ordinal, uint64_t *free_bytes, uint64_t *total_bytes)
{
    ekv_device *device;
    int status = ekv_enter();
    if (status)
        return status;
    status = ekv_device_get(kind, ordinal, &device);
    if (!status && device->driver->memory_info(device, free_bytes, total_bytes))
        status = ekv_error_status();
    ekv_leave();
    return status;
}
