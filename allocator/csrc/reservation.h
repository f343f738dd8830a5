/* A reservation and what backs it.  Everything here is used with the lock held. */
#ifndef EKV_RESERVATION_H
#define EKV_RESERVATION_H

#include "internal.h"

/* One handle mapped at one place. */
typedef struct {
    uint64_t offset;
    uint64_t size;
    ekv_handle handle;
    bool accessible; /* false only where an undo step failed: the next commit sets access again */
} chunk;

typedef struct {
    chunk *items; /* sorted by offset, disjoint (invariant 1) */
    size_t count;
    size_t capacity;
} chunk_list;

typedef struct reservation {
    struct reservation *next;
    uint64_t id;
    ekv_device *device;
    int handle_kind;
    enum { LIVE, RETIRED, DYING } state; /* RETIRED: addresses only, without an owner.  DYING: to be freed */
    bool released;
    uint64_t base, size, granularity, max_chunk;
    ekv_segment *segments; /* sorted by offset, disjoint */
    size_t num_segments;
    uint64_t capacity_blocks, committed_blocks, released_blocks;
    chunk_list chunks;
    chunk_list orphans; /* unmapped handles that the driver refused to take back; counted, tried again */
} reservation;

static inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

/* Where blocks [0, num_blocks) of a segment end in the reservation. */
static inline uint64_t segment_end(const ekv_segment *segment, uint64_t num_blocks)
{
    uint64_t bytes = num_blocks * segment->block_stride;
    return segment->offset + (bytes < segment->size_bytes ? bytes : segment->size_bytes);
}

extern reservation *reservations; /* all of them, the newest first */

/* reservation.c.  NULL and an error of kind EKV_FREED when there is none with that id. */
reservation *reservation_find(uint64_t id);
/* Finds several for one operation and gives their orphans another chance. */
int reservations_find(const uint64_t *ids, size_t num_ids, reservation **found);

/* chunks.c.  Lists that take an item must have room for it (chunks_reserve): after the first driver call of an operation
 * nothing is allocated, so undoing cannot run out of memory. */
int chunks_reserve(chunk_list *list, size_t additional);
void chunks_append(chunk_list *list, chunk item);
void chunks_insert(chunk_list *list, chunk item); /* keeps the order of offsets */
void chunks_free(chunk_list *list);
/* Unmaps a chunk that is in no list and gives its handle back.  A chunk that cannot be unmapped goes to r->chunks, not
 * accessible; a handle that is refused goes to r->orphans.  The driver's first failure is recorded and returned. */
int chunk_drop(reservation *r, const chunk *item);
/* Puts an existing handle at its place; false when it is not mapped, item->accessible says whether it can be used. */
bool chunk_map(reservation *r, chunk *item);
/* Undo of unmapping: maps all again; what cannot be mapped is given back and its content is lost. */
void chunks_restore(reservation *r, chunk_list *unmapped);
/* Gives handles back that are mapped nowhere; refused ones become orphans, which is not an error. */
void handles_release(reservation *r, chunk_list *unmapped);
void orphans_retry(reservation *r);
/* The largest n so that n blocks of every segment lie in accessible chunks. */
uint64_t chunks_covered_blocks(const reservation *r);

/* plan.c: pure.  The chunks that are missing before blocks [0, num_blocks) of every segment are backed; with defragment
 * as if nothing were backed and one chunk per segment.  EKV_OUT_OF_MEMORY when malloc fails. */
int plan_missing(const reservation *r, uint64_t num_blocks, bool defragment, chunk_list *missing);

#endif
