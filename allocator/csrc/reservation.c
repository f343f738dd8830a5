/* Reservations: their list, and taking and giving back address ranges. */
#include "reservation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

reservation *reservations;
static uint64_t last_id;

reservation *reservation_find(uint64_t id)
{
    for (reservation *r = reservations; r; r = r->next)
        if (r->id == id && r->state == LIVE)
            return r;
    ekv_error(EKV_FREED, "reservation %llu was freed", (unsigned long long)id);
    return NULL;
}

int reservations_find(const uint64_t *ids, size_t num_ids, reservation **found)
{
    for (size_t i = 0; i < num_ids; i++) {
        for (size_t j = 0; j < i; j++)
            if (ids[i] == ids[j])
                return ekv_error(EKV_INVALID, "reservation %llu is named twice", (unsigned long long)ids[i]);
        found[i] = reservation_find(ids[i]);
        if (!found[i])
            return ekv_error_status();
        orphans_retry(found[i]);
    }
    return EKV_OK;
}

/* Tries the kinds of handle by really allocating one granule.  Out of memory is never a reason to fall back. */
int ekv_pick_handle_kind(ekv_device *device, int *kind, uint64_t *granularity, char *reason, size_t reason_bytes)
{
    const ekv_driver *driver = device->driver;
    size_t used = 0;
    if (reason_bytes)
        reason[0] = '\0';
    if (ekv_trial_end(device))
        return ekv_error_status();
    for (*kind = EKV_HANDLE_FABRIC; *kind >= EKV_HANDLE_NONE; --*kind) {
        ekv_error_mark mark = ekv_error_get_mark();
        bool rdma = true;
        char text[256];
        int code;
        if (*kind == EKV_HANDLE_FD_RDMA && driver->gpu_direct_rdma(device, &rdma)) {
            ekv_error_rewind(mark, text, sizeof text);
            rdma = false; /* a refused query means no GPUDirect RDMA, nothing worse */
        }
        if (!rdma)
            continue;
        code = driver->granularity(device, *kind, false, granularity);
        if (!code)
            code = driver->create(device, *kind, *granularity, &device->trial.handle);
        if (!code) {
            device->trial.size = *granularity;
            device->trial.created = true;
            if (ekv_trial_end(device))
                ekv_trial_end(device);
            return ekv_error_status();
        }
        if (code == driver->out_of_memory_code && *kind != EKV_HANDLE_FABRIC)
            return ekv_error_status();
        if (*kind == EKV_HANDLE_NONE)
            return ekv_error_status();
        ekv_error_rewind(mark, text, sizeof text);
        if (used < reason_bytes)
            used += (size_t)snprintf(reason + used, reason_bytes - used, "%s%s", used ? "; " : "", text);
    }
    return ekv_error_status();
}

int ekv_reserve_locked(ekv_device *device, uint64_t size, uint64_t max_chunk, int shareable, uint64_t *id,
                       uint64_t *base)
{
    const ekv_driver *driver = device->driver;
    reservation *r;
    if (!size)
        return ekv_error(EKV_INVALID, "a reservation of 0 bytes");
    r = calloc(1, sizeof *r);
    if (!r)
        return ekv_error(EKV_OUT_OF_MEMORY, "malloc failed: %zu bytes", sizeof *r);
    r->device = device;
    if (shareable ? ekv_pick_handle_kind(device, &r->handle_kind, &r->granularity, NULL, 0)
                  : driver->granularity(device, EKV_HANDLE_NONE, false, &r->granularity))
        goto failed;
    if (size > UINT64_MAX / 2) {
        ekv_error(EKV_INVALID, "a reservation of %llu bytes exceeds any address space", (unsigned long long)size);
        goto failed;
    }
    r->size = round_up(size, r->granularity);
    r->max_chunk = max_chunk ? round_up(max_chunk, r->granularity) : 0;
    if (driver->reserve(device, r->size, r->granularity, &r->base))
        goto failed;
    r->id = ++last_id;
    r->next = reservations;
    reservations = r;
    *id = r->id;
    *base = r->base;
    return EKV_OK;
failed:
    free(r);
    return ekv_error_status();
}

/* Gives the memory back, and stays callable when something fails: the failed rest is still recorded. */
static int give_memory_back(reservation *r)
{
    chunk_list old = r->chunks;
    int code, first;
    if (chunks_reserve(&r->orphans, old.count))
        return ekv_error_status();
    first = old.count ? r->device->driver->synchronize(r->device) : 0;
    if (first)
        return first;
    orphans_retry(r);
    r->chunks.count = 0; /* dropped chunks that stay mapped are inserted again, in front of what is still to be read */
    for (size_t i = 0; i < old.count; i++) {
        chunk item = old.items[i];
        code = chunk_drop(r, &item);
        first = first ? first : code;
    }
    if (old.count) {
        r->committed_blocks = 0;
        r->released_blocks = 0;
        r->released = false;
    }
    if (!first && r->orphans.count)
        first = ekv_error(EKV_DRIVER_FAILED, "%s: %zu handles were not taken back", r->device->driver->name,
                          r->orphans.count);
    return first;
}

static int give_back(reservation *r)
{
    int code = give_memory_back(r);
    return code ? code : r->device->driver->unreserve(r->device, r->base, r->size);
}

static void forget(reservation *r)
{
    reservation **link = &reservations;
    while (*link != r)
        link = &(*link)->next;
    *link = r->next;
    chunks_free(&r->chunks);
    chunks_free(&r->orphans);
    free(r->segments);
    free(r);
}

void ekv_retry_locked(void)
{
    for (reservation *r = reservations, *next; r; r = next) {
        ekv_error_mark mark = ekv_error_get_mark();
        next = r->next;
        if (r->state == RETIRED && (r->chunks.count || r->orphans.count))
            give_memory_back(r);
        else if (r->state == DYING && !give_back(r))
            forget(r);
        ekv_error_rewind(mark, NULL, 0);
    }
}

static void drop(reservation *r, bool defer)
{
    if (defer || give_back(r))
        r->state = DYING;
    else
        forget(r);
}

void ekv_drop(uint64_t id)
{
    ekv_error_aside(true);
    if (!ekv_enter()) {
        reservation *r = reservation_find(id);
        if (r)
            drop(r, false);
        ekv_leave();
    }
    ekv_error_aside(false);
}

void ekv_collect(void)
{
    if (ekv_enter())
        return;
    ekv_retry_locked();
    ekv_leave();
}

static int retire(uint64_t id, bool defer)
{
    reservation *r;
    int status = ekv_enter();
    if (status)
        return status;
    r = reservation_find(id);
    if (r) {
        r->state = RETIRED;
        r->committed_blocks = 0;
        r->released_blocks = 0;
        r->released = false;
        free(r->segments);
        r->segments = NULL;
        r->num_segments = 0;
        r->capacity_blocks = 0;
        if (!defer && r->chunks.count)
            give_memory_back(r);
    }
    status = ekv_error_status();
    ekv_leave();
    return status;
}

int ekv_retire(uint64_t id, int defer)
{
    int status;
    ekv_error_aside(true);
    status = retire(id, defer);
    ekv_error_aside(false);
    return status;
}

int ekv_adopt(uint64_t address, uint64_t max_chunk_bytes, uint64_t *id)
{
    int status = ekv_enter();
    if (status)
        return status;
    *id = 0;
    for (reservation *r = reservations; r && !*id; r = r->next)
        if (r->base == address && r->state == RETIRED) {
            r->state = LIVE;
            r->max_chunk = max_chunk_bytes ? round_up(max_chunk_bytes, r->granularity) : 0;
            *id = r->id = ++last_id;
        }
    if (!*id)
        status = ekv_error(EKV_INVALID, "no retired reservation starts at 0x%llx", (unsigned long long)address);
    ekv_leave();
    return status;
}

int ekv_unreserve_at_locked(uint64_t base, void *stream)
{
    for (reservation *r = reservations; r; r = r->next)
        if (r->base == base && r->state != DYING) {
            uint64_t capture = 0;
            bool deferred = r->state == RETIRED && r->chunks.count;
            bool capturing = !r->device->driver->capture_id(r->device, stream, &capture) && capture;
            drop(r, deferred || capturing);
            return 1;
        }
    return 0;
}

int ekv_reserve(int driver, int ordinal, uint64_t size_bytes, uint64_t max_chunk_bytes, int shareable, uint64_t *id)
{
    ekv_device *device;
    uint64_t base;
    int status = ekv_enter();
    if (status)
        return status;
    ekv_retry_locked();
    status = ekv_device_get(driver, ordinal, &device);
    if (!status)
        status = ekv_reserve_locked(device, size_bytes, max_chunk_bytes, shareable, id, &base);
    ekv_leave();
    return status;
}

int ekv_unreserve(uint64_t id)
{
    reservation *r;
    int status = ekv_enter();
    if (status)
        return status;
    ekv_retry_locked();
    r = reservation_find(id);
    if (r && !give_back(r))
        forget(r);
    status = ekv_error_status();
    ekv_leave();
    return status;
}
