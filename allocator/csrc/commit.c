/* Commit and recommit: a ladder over all reservations of a pool.  Nothing is allocated after the first driver call;
 * each undo is armed only after its step succeeded; accounting changes last (invariants 4 and 6).
 *
 * Zeroing is enqueued segment by segment while later chunks are still being mapped, and waited for once. */
#include "reservation.h"

#include <stdlib.h>
#include <string.h>

/* Neighbouring segments are zeroed together up to this size: few calls, and zeroing still overlaps mapping. */
#define ZERO_BYTES (1ull << 30)

typedef struct {
    reservation *r;
    uint64_t from, to;  /* blocks [from, to) are new */
    bool defragment;
    chunk_list missing;  /* planned chunks; the first num_mapped are mapped */
    size_t num_mapped;
    chunk_list replaced; /* defragment: old chunks, unmapped, their handles alive */
} commit_step;

static int prepare(commit_step *s, reservation *r, uint64_t num_blocks, bool defragment)
{
    int status;
    s->r = r;
    s->from = defragment ? 0 : r->committed_blocks;
    s->to = num_blocks;
    s->defragment = defragment;
    status = plan_missing(r, num_blocks, defragment, &s->missing);
    if (!status)
        status = chunks_reserve(&r->chunks, s->missing.count);
    if (!status)
        status = chunks_reserve(&r->orphans, s->missing.count + r->chunks.count);
    if (!status && defragment)
        status = chunks_reserve(&s->replaced, r->chunks.count);
    return status;
}

/* Defragment: frees the addresses but keeps the handles, so that a failure can put the content back. */
static int unmap_old(commit_step *s)
{
    reservation *r = s->r;
    const ekv_driver *driver = r->device->driver;
    int code = driver->synchronize(r->device);
    while (!code && r->chunks.count) {
        const chunk *last = &r->chunks.items[r->chunks.count - 1];
        code = driver->unmap(r->device, r->base + last->offset, last->size);
        if (!code) {
            chunks_append(&s->replaced, *last);
            r->chunks.count--;
        }
    }
    return code;
}

/* Chunks that an undo step once left without access. */
static int repair_access(reservation *r)
{
    for (size_t i = 0; i < r->chunks.count; i++) {
        chunk *item = &r->chunks.items[i];
        if (item->accessible)
            continue;
        int code = r->device->driver->set_access(r->device, r->base + item->offset, item->size);
        if (code)
            return code;
        item->accessible = true;
    }
    return 0;
}

static int create_and_map(commit_step *s)
{
    reservation *r = s->r;
    const ekv_driver *driver = r->device->driver;
    chunk *item = &s->missing.items[s->num_mapped];
    int code = driver->create(r->device, r->handle_kind, item->size, &item->handle);
    if (code)
        return code;
    code = driver->map(r->device, r->base + item->offset, item->size, item->handle);
    if (!code)
        s->num_mapped++;
    else if (driver->release(r->device, item->handle, item->size))
        chunks_append(&r->orphans, *item);
    return code;
}

/* Backs the missing chunks below end: they belong to one segment, access is set once for each contiguous run. */
static int back_until(commit_step *s, uint64_t end)
{
    reservation *r = s->r;
    while (s->num_mapped < s->missing.count && s->missing.items[s->num_mapped].offset < end) {
        uint64_t run_begin = s->missing.items[s->num_mapped].offset, run_end = run_begin;
        int code;
        do {
            code = create_and_map(s);
            if (code)
                return code;
            run_end += s->missing.items[s->num_mapped - 1].size;
        } while (s->num_mapped < s->missing.count && s->missing.items[s->num_mapped].offset == run_end && run_end < end);
        code = r->device->driver->set_access(r->device, r->base + run_begin, run_end - run_begin);
        if (code)
            return code;
    }
    return 0;
}

/* Zeroes [begin, end); where fresh memory is zero already, only what lies in chunks from before. */
static int zero_new(reservation *r, uint64_t begin, uint64_t end)
{
    const ekv_driver *driver = r->device->driver;
    if (!driver->fresh_memory_is_zero)
        return driver->zero(r->device, r->base + begin, end - begin);
    for (size_t i = 0; i < r->chunks.count; i++) {
        const chunk *old = &r->chunks.items[i];
        uint64_t low = old->offset > begin ? old->offset : begin;
        uint64_t high = old->offset + old->size < end ? old->offset + old->size : end;
        int code = low < high ? driver->zero(r->device, r->base + low, high - low) : 0;
        if (code)
            return code;
    }
    return 0;
}

static int back(commit_step *s, bool zero)
{
    reservation *r = s->r;
    int code = s->defragment ? unmap_old(s) : 0;
    uint64_t zero_begin = 0, zero_end = 0; /* backed and still to be zeroed */
    if (!code)
        code = repair_access(r);
    for (size_t i = 0; !code && i < r->num_segments; i++) {
        const ekv_segment *segment = &r->segments[i];
        uint64_t begin = segment_end(segment, s->from);
        uint64_t end = segment_end(segment, s->to);
        if (zero && zero_begin < zero_end && (zero_end != begin || zero_end - zero_begin >= ZERO_BYTES)) {
            code = zero_new(r, zero_begin, zero_end);
            zero_begin = zero_end;
        }
        if (!code)
            code = back_until(s, end);
        if (zero_begin == zero_end)
            zero_begin = begin;
        zero_end = end;
    }
    if (!code && zero && zero_begin < zero_end)
        code = zero_new(r, zero_begin, zero_end);
    return code;
}

static void undo(commit_step *s)
{
    reservation *r = s->r;
    for (size_t i = s->num_mapped; i-- > 0;)
        chunk_drop(r, &s->missing.items[i]);
    if (s->replaced.count) {
        uint64_t covered;
        chunks_restore(r, &s->replaced);
        covered = chunks_covered_blocks(r);
        if (covered < r->committed_blocks)
            r->committed_blocks = covered;
    }
}

static void account(commit_step *s)
{
    reservation *r = s->r;
    for (size_t i = 0; i < s->missing.count; i++)
        s->missing.items[i].accessible = true;
    /* Merge from the end; r->chunks has room. */
    size_t old = r->chunks.count, new = s->missing.count, at = old + new;
    while (new > 0) {
        bool take_old = old > 0 && r->chunks.items[old - 1].offset > s->missing.items[new - 1].offset;
        r->chunks.items[--at] = take_old ? r->chunks.items[--old] : s->missing.items[--new];
    }
    r->chunks.count += s->missing.count;
    handles_release(r, &s->replaced);
    r->committed_blocks = s->to;
    r->released_blocks = 0;
    r->released = false;
}

/* Waits until nothing is zeroed any more.  Where that is refused, whatever waits for the device will do: unmapping memory
 * that is still being written would kill the device's context. */
static int wait_for_zeroes(reservation *r)
{
    const ekv_driver *driver = r->device->driver;
    int code = driver->zero_wait(r->device);
    if (code && driver->zero_wait(r->device))
        driver->synchronize(r->device);
    return code;
}

static int run(commit_step *steps, size_t num_steps, bool zero)
{
    int code = 0;
    size_t tried = 0;
    while (!code && tried < num_steps)
        code = back(&steps[tried++], zero);
    for (size_t i = 0; i < tried; i++) { /* before an undo too: nothing may be unmapped while it is being zeroed */
        int waited = wait_for_zeroes(steps[i].r);
        if (!code)
            code = waited;
    }
    if (!code) {
        for (size_t i = 0; i < num_steps; i++)
            account(&steps[i]);
        return EKV_OK;
    }
    while (tried > 0)
        undo(&steps[--tried]);
    return ekv_error_status();
}

/* What this operation has to do for r: false when nothing. */
static int target(const reservation *r, bool recommit, uint64_t num_blocks, bool defragment, uint64_t *to, bool *needed)
{
    *to = recommit ? r->released_blocks : num_blocks;
    if (defragment && *to < r->committed_blocks)
        *to = r->committed_blocks;
    *needed = recommit ? r->released : *to > r->committed_blocks || (defragment && *to);
    if (recommit)
        return EKV_OK;
    if (r->released)
        return ekv_error(EKV_INVALID, "commit of %llu blocks while the physical memory is released: recommit first",
                         (unsigned long long)num_blocks);
    if (!r->num_segments)
        return ekv_error(EKV_INVALID, "commit of %llu blocks before bind", (unsigned long long)num_blocks);
    if (num_blocks > r->capacity_blocks)
        return ekv_error(EKV_INVALID, "commit of %llu blocks exceeds the capacity of %llu blocks",
                         (unsigned long long)num_blocks, (unsigned long long)r->capacity_blocks);
    return EKV_OK;
}

static int commit_locked(const uint64_t *ids, size_t num_ids, bool recommit, uint64_t num_blocks, int flags)
{
    bool defragment = flags & EKV_COMMIT_DEFRAGMENT;
    reservation **found = calloc(num_ids, sizeof *found);
    commit_step *steps = calloc(num_ids, sizeof *steps);
    size_t num_steps = 0;
    int status = found && steps ? reservations_find(ids, num_ids, found)
                                : ekv_error(EKV_OUT_OF_MEMORY, "malloc failed: %zu bytes", num_ids * sizeof *steps);
    for (size_t i = 0; !status && i < num_ids; i++) {
        uint64_t to;
        bool needed;
        status = target(found[i], recommit, num_blocks, defragment, &to, &needed);
        if (!status && needed)
            status = prepare(&steps[num_steps++], found[i], to, defragment);
    }
    if (!status)
        status = run(steps, num_steps, flags & EKV_COMMIT_ZERO);
    for (size_t i = 0; i < num_steps; i++) {
        chunks_free(&steps[i].missing);
        chunks_free(&steps[i].replaced);
    }
    free(steps);
    free(found);
    return status;
}

int ekv_commit(const uint64_t *ids, size_t num_ids, uint64_t num_blocks, int flags)
{
    int status = ekv_enter();
    if (status)
        return status;
    status = commit_locked(ids, num_ids, false, num_blocks, flags);
    ekv_leave();
    return status;
}

int ekv_recommit(const uint64_t *ids, size_t num_ids)
{
    int status = ekv_enter();
    if (status)
        return status;
    status = commit_locked(ids, num_ids, true, 0, EKV_COMMIT_ZERO);
    ekv_leave();
    return status;
}
