/* Segments in, descriptions out: what a caller tells and asks about a reservation.  No driver calls. */
#include "reservation.h"

#include <stdlib.h>
#include <string.h>

static uint64_t physical_bytes(const reservation *r)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < r->chunks.count; i++)
        bytes += r->chunks.items[i].size;
    for (size_t i = 0; i < r->orphans.count; i++)
        bytes += r->orphans.items[i].size;
    return bytes;
}

static int check_segments(const reservation *r, const ekv_segment *segments, size_t num_segments, uint64_t capacity)
{
    uint64_t end = 0;
    if (r->released)
        return ekv_error(EKV_INVALID, "bind while the physical memory is released");
    if (r->committed_blocks)
        return ekv_error(EKV_INVALID, "bind after %llu blocks were committed",
                         (unsigned long long)r->committed_blocks);
    for (size_t i = 0; i < num_segments; i++) {
        const ekv_segment *s = &segments[i];
        if (!s->block_stride)
            return ekv_error(EKV_INVALID, "segment %zu has a block stride of 0 bytes", i);
        if (s->offset < end)
            return ekv_error(EKV_INVALID, "segment %zu begins at offset %llu, inside the one before, which ends at %llu",
                             i, (unsigned long long)s->offset, (unsigned long long)end);
        if (s->offset > r->size || s->size_bytes > r->size - s->offset)
            return ekv_error(EKV_INVALID, "segment %zu: %llu bytes at offset %llu exceed the reservation of %llu bytes",
                             i, (unsigned long long)s->size_bytes, (unsigned long long)s->offset,
                             (unsigned long long)r->size);
        if (!s->size_bytes || (s->size_bytes - 1) / s->block_stride + 1 != capacity)
            return ekv_error(EKV_INVALID, "segment %zu: %llu bytes are not %llu blocks of %llu bytes", i,
                             (unsigned long long)s->size_bytes, (unsigned long long)capacity,
                             (unsigned long long)s->block_stride);
        end = s->offset + s->size_bytes;
    }
    return EKV_OK;
}

int ekv_set_segments(uint64_t id, const ekv_segment *segments, size_t num_segments, uint64_t capacity_blocks)
{
    ekv_segment *copy = NULL;
    reservation *r;
    int status = ekv_enter();
    if (status)
        return status;
    r = reservation_find(id);
    status = r ? check_segments(r, segments, num_segments, capacity_blocks) : ekv_error_status();
    if (!status) {
        copy = malloc(num_segments * sizeof *copy + 1);
        if (!copy)
            status = ekv_error(EKV_OUT_OF_MEMORY, "malloc failed: %zu bytes", num_segments * sizeof *copy);
    }
    if (!status) {
        if (num_segments)
            memcpy(copy, segments, num_segments * sizeof *copy);
        free(r->segments);
        r->segments = copy;
        r->num_segments = num_segments;
        r->capacity_blocks = capacity_blocks;
    }
    ekv_leave();
    return status;
}

int ekv_get_info(uint64_t id, ekv_reservation_info *info)
{
    reservation *r;
    int status = ekv_enter();
    if (status)
        return status;
    r = reservation_find(id);
    if (r)
        *info = (ekv_reservation_info){
            .base = r->base,
            .size = r->size,
            .granularity = r->granularity,
            .physical_bytes = physical_bytes(r),
            .capacity_blocks = r->capacity_blocks,
            .committed_blocks = r->committed_blocks,
            .released_blocks = r->released_blocks,
            .num_segments = r->num_segments,
            .num_chunks = r->chunks.count,
            .driver = r->device->driver->kind,
            .device = r->device->ordinal,
            .handle_kind = r->handle_kind,
        };
    status = ekv_error_status();
    ekv_leave();
    return status;
}

int ekv_get_chunks(uint64_t id, ekv_chunk_info *chunks, size_t capacity, size_t *num_chunks)
{
    reservation *r;
    int status = ekv_enter();
    if (status)
        return status;
    r = reservation_find(id);
    if (r) {
        *num_chunks = r->chunks.count;
        for (size_t i = 0; i < r->chunks.count && i < capacity; i++)
            chunks[i] = (ekv_chunk_info){r->chunks.items[i].offset, r->chunks.items[i].size};
    }
    status = ekv_error_status();
    ekv_leave();
    return status;
}

size_t ekv_num_reservations(void)
{
    size_t count = 0;
    if (ekv_enter())
        return 0;
    for (reservation *r = reservations; r; r = r->next)
        count += r->state != RETIRED;
    ekv_leave();
    return count;
}

uint64_t ekv_reserved_bytes_locked(int driver, int device)
{
    uint64_t bytes = 0;
    for (reservation *r = reservations; r; r = r->next)
        if (r->device->driver->kind == driver && r->device->ordinal == device)
            bytes += r->size;
    return bytes;
}

uint64_t ekv_reserved_bytes(int driver, int device)
{
    uint64_t bytes;
    if (ekv_enter())
        return 0;
    bytes = ekv_reserved_bytes_locked(driver, device);
    ekv_leave();
    return bytes;
}
