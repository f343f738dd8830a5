/* Chunk lists, and putting single chunks in place and away. */
#include "reservation.h"

#include <stdlib.h>

int chunks_reserve(chunk_list *list, size_t additional)
{
    size_t needed = list->count + additional, capacity = list->capacity * 2;
    chunk *items;
    if (needed <= list->capacity)
        return EKV_OK;
    if (capacity < needed)
        capacity = needed;
    items = realloc(list->items, capacity * sizeof *items);
    if (!items)
        return ekv_error(EKV_OUT_OF_MEMORY, "malloc failed: %zu bytes", capacity * sizeof *items);
    list->items = items;
    list->capacity = capacity;
    return EKV_OK;
}

void chunks_append(chunk_list *list, chunk item) { list->items[list->count++] = item; }

void chunks_free(chunk_list *list)
{
    free(list->items);
    *list = (chunk_list){0};
}

int chunk_drop(reservation *r, const chunk *item)
{
    const ekv_driver *driver = r->device->driver;
    int code = driver->unmap(r->device, r->base + item->offset, item->size);
    if (code) {
        chunks_insert(&r->chunks, (chunk){item->offset, item->size, item->handle, false});
        return code;
    }
    code = driver->release(r->device, item->handle, item->size);
    if (code)
        chunks_append(&r->orphans, *item);
    return code;
}

bool chunk_map(reservation *r, chunk *item)
{
    const ekv_driver *driver = r->device->driver;
    item->accessible = false;
    if (driver->map(r->device, r->base + item->offset, item->size, item->handle))
        return false;
    item->accessible = !driver->set_access(r->device, r->base + item->offset, item->size);
    return true;
}

void chunks_insert(chunk_list *list, chunk item)
{
    size_t i = list->count++;
    for (; i > 0 && list->items[i - 1].offset > item.offset; i--)
        list->items[i] = list->items[i - 1];
    list->items[i] = item;
}

static bool overlaps(const chunk_list *list, const chunk *item)
{
    for (size_t i = 0; i < list->count; i++)
        if (item->offset < list->items[i].offset + list->items[i].size &&
            list->items[i].offset < item->offset + item->size)
            return true;
    return false;
}

void chunks_restore(reservation *r, chunk_list *unmapped)
{
    for (size_t i = unmapped->count; i-- > 0;) {
        chunk *item = &unmapped->items[i];
        if (!overlaps(&r->chunks, item) && chunk_map(r, item)) /* a new chunk may have refused to go */
            chunks_insert(&r->chunks, *item);
        else if (r->device->driver->release(r->device, item->handle, item->size))
            chunks_append(&r->orphans, *item);
    }
    unmapped->count = 0;
}

void handles_release(reservation *r, chunk_list *unmapped)
{
    for (size_t i = 0; i < unmapped->count; i++) {
        ekv_error_mark mark = ekv_error_get_mark();
        chunk *item = &unmapped->items[i];
        if (r->device->driver->release(r->device, item->handle, item->size)) {
            ekv_error_rewind(mark, NULL, 0);
            chunks_append(&r->orphans, *item);
        }
    }
    unmapped->count = 0;
}

void orphans_retry(reservation *r)
{
    size_t left = 0;
    for (size_t i = 0; i < r->orphans.count; i++) {
        chunk *orphan = &r->orphans.items[i];
        ekv_error_mark mark = ekv_error_get_mark();
        if (r->device->driver->release(r->device, orphan->handle, orphan->size)) {
            ekv_error_rewind(mark, NULL, 0);
            r->orphans.items[left++] = *orphan;
        }
    }
    r->orphans.count = left;
}

/* The end of the accessible bytes that begin at offset; offset itself when there are none. */
static uint64_t accessible_end(const chunk_list *chunks, uint64_t offset)
{
    size_t low = 0, high = chunks->count;
    while (low < high) { /* the first chunk that ends above offset */
        size_t middle = low + (high - low) / 2;
        if (chunks->items[middle].offset + chunks->items[middle].size <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < chunks->count; low++) {
        const chunk *item = &chunks->items[low];
        if (!item->accessible || item->offset > offset)
            break;
        offset = item->offset + item->size;
    }
    return offset;
}

uint64_t chunks_covered_blocks(const reservation *r)
{
    uint64_t blocks = r->capacity_blocks;
    for (size_t i = 0; i < r->num_segments; i++) {
        const ekv_segment *segment = &r->segments[i];
        uint64_t covered = accessible_end(&r->chunks, segment->offset) - segment->offset;
        if (covered < segment->size_bytes && covered / segment->block_stride < blocks)
            blocks = covered / segment->block_stride;
    }
    return blocks;
}
