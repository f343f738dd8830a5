/* The cache behind ekv_malloc for everything that no pool takes: freed memory is used again for the same size, device
 * and stream, so that in a steady state no driver call is made.
 *
 * Memory that was allocated or freed while its stream was being captured belongs to that capture: it is used again
 * inside it and nowhere else, because the graph will touch it at every replay; the driver never gets it back.  Memory
 * that other streams used too (ekv_record_stream) waits for them before it is used again. */
#include "cache.h"

#include <stdlib.h>

#define NEVER UINT64_MAX /* the capture of a block that two captures have used */
#define MAX_STREAMS 7    /* a block used by more waits for the whole device */

typedef struct block {
    uint64_t address, size, capture;
    ekv_device *device;
    void *stream;
    struct block *next; /* in its bucket: of live blocks by address, of free ones by what they fit */
    unsigned num_streams;
    void *streams[MAX_STREAMS];
} block;

typedef struct {
    block **buckets;
    size_t mask, count;
} table;

static table live, unused;
static uint64_t cached_bytes;

static uint64_t mix(uint64_t value)
{
    value ^= value >> 33;
    value *= 0xff51afd7ed558ccdull;
    return value ^ value >> 29;
}

static uint64_t fit_hash(const block *b)
{
    return mix(mix(b->size ^ (uint64_t)b->stream) ^ (uint64_t)b->device ^ b->capture);
}

static bool fits(const block *a, const block *b)
{
    return a->size == b->size && a->stream == b->stream && a->device == b->device && a->capture == b->capture;
}

static bool grow(table *t, uint64_t (*hash)(const block *))
{
    size_t size = t->buckets ? 2 * (t->mask + 1) : 1024;
    block **buckets = calloc(size, sizeof *buckets);
    if (!buckets)
        return false;
    for (size_t i = 0; t->buckets && i <= t->mask; i++)
        for (block *b = t->buckets[i], *next; b; b = next) {
            block **bucket = &buckets[hash(b) & (size - 1)];
            next = b->next;
            b->next = *bucket;
            *bucket = b;
        }
    free(t->buckets);
    t->buckets = buckets;
    t->mask = size - 1;
    return true;
}

static uint64_t address_hash(const block *b) { return mix(b->address); }

/* A table that cannot grow only becomes slower; the first allocation is the only one that can fail. */
static bool insert(table *t, block *b, uint64_t (*hash)(const block *))
{
    block **bucket;
    if ((!t->buckets || t->count > t->mask) && !grow(t, hash) && !t->buckets)
        return false;
    bucket = &t->buckets[hash(b) & t->mask];
    b->next = *bucket;
    *bucket = b;
    t->count++;
    return true;
}

static block *take(table *t, block **link)
{
    block *b = *link;
    *link = b->next;
    t->count--;
    return b;
}

static block **find_live(uint64_t address)
{
    block **link;
    if (!live.buckets)
        return NULL;
    for (link = &live.buckets[mix(address) & live.mask]; *link; link = &(*link)->next)
        if ((*link)->address == address)
            return link;
    return NULL;
}

static block *take_fitting(const block *wanted)
{
    if (!unused.buckets)
        return NULL;
    for (block **link = &unused.buckets[fit_hash(wanted) & unused.mask]; *link; link = &(*link)->next)
        if (fits(*link, wanted)) {
            cached_bytes -= wanted->size;
            return take(&unused, link);
        }
    return NULL;
}

/* Multiples of 512, from 8 KiB on eight steps for each doubling: at most an eighth is wasted, and sizes meet again. */
static uint64_t round_size(uint64_t size)
{
    uint64_t step = 512;
    while (step * 16 < size)
        step *= 2;
    return (size + step - 1) / step * step;
}

static uint64_t capture_of(ekv_device *device, void *stream)
{
    ekv_error_mark mark = ekv_error_get_mark();
    uint64_t capture = 0;
    if (device->driver->capture_id(device, stream, &capture)) {
        ekv_error_rewind(mark, NULL, 0);
        capture = 0;
    }
    return capture;
}

void ekv_cache_trim_locked(ekv_device *device)
{
    ekv_error_mark mark = ekv_error_get_mark();
    for (size_t i = 0; unused.buckets && i <= unused.mask; i++)
        for (block **link = &unused.buckets[i]; *link;) {
            block *b = *link;
            if (b->capture || (device && b->device != device) || b->device->driver->free(b->device, b->address)) {
                link = &b->next;
                continue;
            }
            cached_bytes -= b->size;
            free(take(&unused, link));
        }
    ekv_error_rewind(mark, NULL, 0);
}

int ekv_cache_allocate_locked(ekv_device *device, uint64_t size, void *stream, uint64_t *address)
{
    block wanted = {.size = round_size(size), .device = device, .stream = stream};
    block *b;
    int status = EKV_OK;
    wanted.capture = capture_of(device, stream);
    b = take_fitting(&wanted);
    if (!b) {
        b = malloc(sizeof *b);
        if (!b)
            return ekv_error(EKV_OUT_OF_MEMORY, "malloc failed: %zu bytes", sizeof *b);
        *b = wanted;
        if (device->driver->allocate(device, b->size, &b->address)) {
            status = ekv_error_status();
            if (status == EKV_OUT_OF_MEMORY && !wanted.capture) {
                ekv_error_clear();
                ekv_cache_trim_locked(device);
                ekv_retry_locked();
                status = device->driver->allocate(device, b->size, &b->address) ? ekv_error_status() : EKV_OK;
            }
        }
    }
    if (!status && !insert(&live, b, address_hash)) {
        device->driver->free(device, b->address);
        status = ekv_error(EKV_OUT_OF_MEMORY, "malloc failed");
    }
    if (status)
        free(b);
    else
        *address = b->address;
    return status;
}

/* Before memory is used again: the streams that were recorded for it have passed. */
static bool wait_for_streams(block *b)
{
    ekv_error_mark mark = ekv_error_get_mark();
    int code = 0;
    if (b->num_streams > MAX_STREAMS)
        code = b->device->driver->synchronize(b->device);
    for (unsigned i = 0; !code && b->num_streams <= MAX_STREAMS && i < b->num_streams; i++)
        code = b->device->driver->stream_wait(b->device, b->streams[i]);
    ekv_error_rewind(mark, NULL, 0);
    b->num_streams = 0;
    return !code;
}

bool ekv_cache_free_locked(uint64_t address)
{
    block **link = find_live(address), *b;
    uint64_t capture;
    if (!link)
        return false;
    b = take(&live, link);
    capture = capture_of(b->device, b->stream);
    if (capture)
        b->capture = b->capture && b->capture != capture ? NEVER : capture;
    if (b->num_streams && (capture || !wait_for_streams(b)))
        b->capture = NEVER;
    cached_bytes += b->size;
    if (!insert(&unused, b, fit_hash)) { /* no memory for the very first table: nothing can be cached */
        cached_bytes -= b->size;
        b->device->driver->free(b->device, b->address);
        free(b);
    }
    return true;
}

void ekv_record_stream(void *address, void *stream)
{
    block **link;
    if (ekv_enter())
        return;
    link = find_live((uint64_t)address);
    if (link && (*link)->stream != stream) {
        block *b = *link;
        bool known = b->num_streams > MAX_STREAMS;
        for (unsigned i = 0; !known && i < b->num_streams; i++)
            known = b->streams[i] == stream;
        if (!known && b->num_streams < MAX_STREAMS)
            b->streams[b->num_streams] = stream;
        if (!known)
            b->num_streams++;
    }
    ekv_leave();
}

void ekv_empty_cache(void)
{
    if (ekv_enter())
        return;
    ekv_cache_trim_locked(NULL);
    ekv_leave();
}

uint64_t ekv_cached_bytes(void)
{
    uint64_t bytes;
    if (ekv_enter())
        return 0;
    bytes = cached_bytes;
    ekv_leave();
    return bytes;
}
