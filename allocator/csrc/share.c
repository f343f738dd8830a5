/* Export and import: the same physical memory mapped by several processes of one machine, as file descriptors. */
#include "reservation.h"

int ekv_export_chunk(uint64_t id, size_t index, ekv_chunk_info *info, int *file)
{
    reservation *r;
    int status = ekv_enter();
    if (status)
        return status;
    r = reservation_find(id);
    if (!r)
        status = ekv_error_status();
    else if (index >= r->chunks.count)
        status = ekv_error(EKV_INVALID, "export of chunk %zu: there are %zu", index, r->chunks.count);
    else if (r->handle_kind == EKV_HANDLE_NONE && r->device->driver->kind != EKV_HOST)
        status = ekv_error(EKV_INVALID, "export of memory that was not allocated as shareable");
    else {
        const chunk *item = &r->chunks.items[index];
        *info = (ekv_chunk_info){item->offset, item->size};
        if (r->device->driver->export_file(r->device, item->handle, file))
            status = ekv_error_status();
    }
    ekv_leave();
    return status;
}

static int check_import(const reservation *r, const ekv_chunk_info *chunks, size_t num_chunks, uint64_t num_blocks)
{
    uint64_t end = 0;
    if (r->chunks.count || r->released)
        return ekv_error(EKV_INVALID, "import into a reservation that holds %zu chunks", r->chunks.count);
    if (!r->num_segments || num_blocks > r->capacity_blocks)
        return ekv_error(EKV_INVALID, "import of %llu blocks into %zu segments with a capacity of %llu blocks",
                         (unsigned long long)num_blocks, r->num_segments, (unsigned long long)r->capacity_blocks);
    for (size_t i = 0; i < num_chunks; i++) {
        const ekv_chunk_info *c = &chunks[i];
        if (c->offset < end || c->offset % r->granularity || !c->size || c->size % r->granularity ||
            c->offset > r->size || c->size > r->size - c->offset)
            return ekv_error(EKV_INVALID, "import of chunk %zu: %llu bytes at offset %llu, the reservation has %llu "
                             "bytes and a granularity of %llu",
                             i, (unsigned long long)c->size, (unsigned long long)c->offset,
                             (unsigned long long)r->size, (unsigned long long)r->granularity);
        end = c->offset + c->size;
    }
    return EKV_OK;
}

/* One chunk; what was done is undone when a later step of it fails. */
static int import_chunk(reservation *r, const ekv_chunk_info *info, int file)
{
    const ekv_driver *driver = r->device->driver;
    chunk item = {.offset = info->offset, .size = info->size};
    int code = driver->import_file(r->device, file, item.size, &item.handle);
    if (code)
        return code;
    if (!chunk_map(r, &item)) {
        code = ekv_error_status();
        if (driver->release(r->device, item.handle, item.size))
            chunks_append(&r->orphans, item);
        return code;
    }
    if (!item.accessible) {
        code = ekv_error_status();
        chunk_drop(r, &item);
        return code;
    }
    chunks_insert(&r->chunks, item);
    return 0;
}

/* Unmaps all chunks of a reservation with room for their handles among the orphans. */
static void drop_chunks(reservation *r)
{
    size_t count = r->chunks.count;
    r->chunks.count = 0; /* what cannot be unmapped is inserted again, in front of what is still to be read */
    for (size_t i = 0; i < count; i++) {
        chunk item = r->chunks.items[i];
        chunk_drop(r, &item);
    }
}

/* What an earlier attempt could not unmap: nobody was told of it, nobody can use it. */
static int drop_leftovers(reservation *r)
{
    if (r->committed_blocks || r->released)
        return EKV_OK;
    orphans_retry(r);
    for (size_t i = 0; i < r->chunks.count; i++)
        if (r->chunks.items[i].accessible)
            return EKV_OK;
    if (chunks_reserve(&r->orphans, r->chunks.count))
        return ekv_error_status();
    drop_chunks(r);
    return ekv_error_status();
}

static int import_locked(reservation *r, const ekv_chunk_info *chunks, const int *files, size_t num_chunks,
                         uint64_t num_blocks)
{
    int status = drop_leftovers(r);
    if (!status)
        status = check_import(r, chunks, num_chunks, num_blocks);
    if (!status)
        status = chunks_reserve(&r->chunks, num_chunks);
    if (!status)
        status = chunks_reserve(&r->orphans, num_chunks);
    if (status)
        return status; /* nothing was imported: what the reservation holds is its own */
    for (size_t i = 0; !status && i < num_chunks; i++)
        if (import_chunk(r, &chunks[i], files[i]))
            status = ekv_error_status();
    if (!status && chunks_covered_blocks(r) < num_blocks)
        status = ekv_error(EKV_INVALID, "import of %llu blocks: the chunks back only %llu",
                           (unsigned long long)num_blocks, (unsigned long long)chunks_covered_blocks(r));
    if (!status) {
        r->committed_blocks = num_blocks;
        return EKV_OK;
    }
    drop_chunks(r);
    return status;
}

int ekv_import_chunks(uint64_t id, const ekv_chunk_info *chunks, const int *files, size_t num_chunks,
                      uint64_t num_blocks)
{
    reservation *r;
    int status = ekv_enter();
    if (status)
        return status;
    r = reservation_find(id);
    status = r ? import_locked(r, chunks, files, num_chunks, num_blocks) : ekv_error_status();
    ekv_leave();
    return status;
}
