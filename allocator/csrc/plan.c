/* Which chunks a commit has to add: pure arithmetic on segments and chunks. */
#include "reservation.h"

static uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }

/* Adds [begin, end) in pieces of at most max_chunk bytes (0: one piece).  shared: begin is inside a segment whose first
 * granule belongs to the piece before, which then grows, so that a whole segment is in one piece here too. */
static int add_gap(chunk_list *missing, uint64_t begin, uint64_t end, uint64_t max_chunk, bool shared)
{
    chunk *last = missing->count ? &missing->items[missing->count - 1] : NULL;
    if (shared && !max_chunk && last && last->offset + last->size == begin) {
        last->size += end - begin;
        return EKV_OK;
    }
    while (begin < end) {
        uint64_t size = max_chunk && end - begin > max_chunk ? max_chunk : end - begin;
        int status = chunks_reserve(missing, 1);
        if (status)
            return status;
        chunks_append(missing, (chunk){.offset = begin, .size = size});
        begin += size;
    }
    return EKV_OK;
}

int plan_missing(const reservation *r, uint64_t num_blocks, bool defragment, chunk_list *missing)
{
    uint64_t max_chunk = defragment ? 0 : r->max_chunk;
    uint64_t covered = 0; /* everything below is backed or planned */
    size_t next = 0;      /* the first chunk that may end above covered */
    size_t num_chunks = defragment ? 0 : r->chunks.count;

    for (size_t i = 0; i < r->num_segments && num_blocks; i++) {
        const ekv_segment *segment = &r->segments[i];
        uint64_t end = round_up(segment_end(segment, num_blocks), r->granularity);
        uint64_t begin = round_down(segment->offset, r->granularity);
        bool shared = begin < covered;
        if (shared)
            begin = covered;
        while (begin < end) {
            uint64_t gap_end = end;
            int status;
            while (next < num_chunks && r->chunks.items[next].offset + r->chunks.items[next].size <= begin)
                next++;
            if (next < num_chunks && r->chunks.items[next].offset <= begin) {
                begin = r->chunks.items[next].offset + r->chunks.items[next].size;
                continue;
            }
            if (next < num_chunks && r->chunks.items[next].offset < gap_end)
                gap_end = r->chunks.items[next].offset;
            status = add_gap(missing, begin, gap_end, max_chunk, shared);
            if (status)
                return status;
            begin = gap_end;
        }
        if (covered < end)
            covered = end;
    }
    return EKV_OK;
}
