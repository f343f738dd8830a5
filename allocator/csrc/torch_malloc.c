/* ekv_malloc and ekv_free, the two functions that PyTorch's CUDAPluggableAllocator calls.
 *
 * An allocation on a thread between ekv_route_begin and ekv_route_end becomes a reservation without memory; any other
 * comes from the cache.  A failure returns NULL and stays in the thread's error record: in a MemPool PyTorch raises its
 * out-of-memory error, as the current allocator it makes a tensor at address 0. */
#include "cache.h"

#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void *ekv_malloc(ssize_t size, int device, void *stream);
EXPORT void ekv_free(void *address, ssize_t size, int device, void *stream);

static _Thread_local struct {
    bool armed;
    int device;
    int shareable;
    uint64_t max_chunk;
    uint64_t id; /* the reservation that was made */
} route;

static int torch_driver = EKV_CUDA;

int ekv_torch_driver(int driver)
{
    int status = ekv_enter();
    if (status)
        return status;
    if (driver != EKV_CUDA && driver != EKV_HIP)
        status = ekv_error(EKV_INVALID, "driver %d does not serve PyTorch's allocator", driver);
    else
        torch_driver = driver;
    ekv_leave();
    return status;
}

int ekv_route_begin(int device, uint64_t max_chunk_bytes, int shareable)
{
    ekv_error_clear();
    if (route.armed)
        return ekv_error(EKV_INVALID, "this thread is already inside a routed allocation");
    route.armed = true;
    route.device = device;
    route.shareable = shareable;
    route.max_chunk = max_chunk_bytes;
    route.id = 0;
    return EKV_OK;
}

uint64_t ekv_route_end(void)
{
    route.armed = false;
    return route.id;
}

static int allocate(uint64_t size, int ordinal, void *stream, uint64_t *address)
{
    ekv_device *device;
    int status = ekv_device_get(torch_driver, ordinal, &device);
    if (status)
        return status;
    if (route.armed && !route.id && route.device == ordinal)
        return ekv_reserve_locked(device, size, route.max_chunk, route.shareable, &route.id, address);
    return ekv_cache_allocate_locked(device, size, stream, address);
}

void *ekv_malloc(ssize_t size, int device, void *stream)
{
    uint64_t address = 0;
    if (size <= 0 || ekv_enter())
        return NULL;
    if (allocate((uint64_t)size, device, stream, &address))
        address = 0;
    ekv_leave();
    return (void *)address;
}

/* PyTorch cannot be told of a failure: what cannot be given back now is tried again at the next call.  In a forked
 * child and after the driver has shut down there is nothing to give back. */
void ekv_free(void *address, ssize_t size, int ordinal, void *stream)
{
    (void)size;
    (void)ordinal;
    if (!address)
        return;
    ekv_error_aside(true);
    if (!ekv_enter()) {
        if (!ekv_cache_free_locked((uint64_t)address))
            ekv_unreserve_at_locked((uint64_t)address, stream);
        ekv_leave();
    }
    ekv_error_aside(false);
}
