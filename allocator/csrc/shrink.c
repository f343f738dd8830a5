/* Shrink and release: whole chunks go back to the device.  First everything is unmapped (undone by mapping the same
 * handles again, which keeps their content), then the handles are given back. */
#include "reservation.h"

#include <stdlib.h>

typedef struct {
    reservation *r;
    uint64_t num_blocks;
    chunk_list unmapped;
} shrink_step;

/* Whether a chunk holds bytes of blocks [0, num_blocks) of some segment. */
static bool is_needed(const reservation *r, const chunk *item, uint64_t num_blocks)
{
    size_t low = 0, high = r->num_segments;
    uint64_t chunk_end = item->offset + item->size;
    if (!num_blocks)
        return false;
    while (low < high) { /* the first segment whose kept bytes end above the chunk's begin */
        size_t middle = low + (high - low) / 2;
        if (segment_end(&r->segments[middle], num_blocks) <= item->offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low < r->num_segments && r->segments[low].offset < chunk_end;
}

static int unmap_unneeded(shrink_step *s)
{
    reservation *r = s->r;
    size_t kept = 0, i;
    int code = r->device->driver->synchronize(r->device);
    if (code)
        return code;
    for (i = 0; i < r->chunks.count; i++) {
        chunk *item = &r->chunks.items[i];
        if (!is_needed(r, item, s->num_blocks)) {
            code = r->device->driver->unmap(r->device, r->base + item->offset, item->size);
            if (code)
                break;
            chunks_append(&s->unmapped, *item);
        } else {
            r->chunks.items[kept++] = *item;
        }
    }
    for (; i < r->chunks.count; i++)
        r->chunks.items[kept++] = r->chunks.items[i];
    r->chunks.count = kept;
    return code;
}

static void undo(shrink_step *s)
{
    reservation *r = s->r;
    uint64_t covered;
    if (!s->unmapped.count)
        return;
    chunks_restore(r, &s->unmapped);
    covered = chunks_covered_blocks(r);
    if (covered < r->committed_blocks)
        r->committed_blocks = covered;
}

static void account(shrink_step *s, bool release)
{
    reservation *r = s->r;
    handles_release(r, &s->unmapped);
    if (release) {
        r->released = true;
        r->released_blocks = r->committed_blocks;
    }
    if (s->num_blocks < r->committed_blocks)
        r->committed_blocks = s->num_blocks;
}

static int shrink_locked(const uint64_t *ids, size_t num_ids, uint64_t num_blocks, bool release)
{
    reservation **found = calloc(num_ids, sizeof *found);
    shrink_step *steps = calloc(num_ids, sizeof *steps);
    size_t num_steps = 0, done = 0;
    int code = 0;
    int status = found && steps ? reservations_find(ids, num_ids, found)
                                : ekv_error(EKV_OUT_OF_MEMORY, "malloc failed: %zu bytes", num_ids * sizeof *steps);
    for (size_t i = 0; !status && i < num_ids; i++) {
        reservation *r = found[i];
        shrink_step *s = &steps[num_steps];
        if (r->released || (!release && num_blocks >= r->committed_blocks))
            continue;
        *s = (shrink_step){.r = r, .num_blocks = num_blocks};
        num_steps++;
        status = chunks_reserve(&s->unmapped, r->chunks.count);
        if (!status)
            status = chunks_reserve(&r->orphans, r->chunks.count);
    }
    while (!status && !code && done < num_steps)
        code = unmap_unneeded(&steps[done++]);
    if (code) {
        while (done > 0)
            undo(&steps[--done]);
        status = ekv_error_status();
    }
    for (size_t i = 0; i < num_steps; i++) {
        if (!status)
            account(&steps[i], release);
        chunks_free(&steps[i].unmapped);
    }
    free(steps);
    free(found);
    return status;
}

int ekv_shrink(const uint64_t *ids, size_t num_ids, uint64_t num_blocks)
{
    int status = ekv_enter();
    if (status)
        return status;
    status = shrink_locked(ids, num_ids, num_blocks, false);
    ekv_leave();
    return status;
}

int ekv_release_physical(const uint64_t *ids, size_t num_ids)
{
    int status = ekv_enter();
    if (status)
        return status;
    status = shrink_locked(ids, num_ids, 0, true);
    ekv_leave();
    return status;
}
