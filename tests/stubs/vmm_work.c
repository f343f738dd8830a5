/* Streams, and work that happens only when somebody waits for it.  See vmm_sim.h. */
#include "vmm_sim.h"

#include <stdlib.h>
#include <string.h>

typedef struct stream {
    uint64_t id;
    int device;
    bool non_blocking;
    struct stream *next;
} stream;

typedef struct work {
    uint64_t stream, to, from, size; /* from 0: fill with value */
    int device;
    unsigned char value;
    struct work *next;
} work;

static stream *streams;
static work *queue;
static uint64_t next_stream = 0x5000;

static stream *find_stream(uint64_t id)
{
    for (stream *each = streams; each; each = each->next)
        if (each->id == id)
            return each;
    return NULL;
}

size_t sim_live_streams(void)
{
    size_t count = 0;
    for (stream *each = streams; each; each = each->next)
        count++;
    return count;
}

int sim_stream_create(uint64_t *id, bool non_blocking)
{
    stream *each = calloc(1, sizeof *each);
    *each = (stream){.id = next_stream += 8, .device = sim_current_device(), .non_blocking = non_blocking,
                     .next = streams};
    streams = each;
    *id = each->id;
    return SIM_OK;
}

static int check_stream(uint64_t id)
{
    stream *each = find_stream(id);
    if (!id)
        return SIM_OK;
    if (!each)
        return sim_violation(SIM_INVALID_HANDLE, "used a stream that does not exist");
    if (each->device != sim_current_device())
        return sim_violation(SIM_INVALID_HANDLE, "used a stream of device %d on device %d", each->device,
                             sim_current_device());
    return SIM_OK;
}

static int touch(int device, uint64_t address, uint64_t size)
{
    if (sim_accessible(device, address, size))
        return SIM_OK;
    sim.devices[device].dead = true;
    return sim_violation(SIM_ILLEGAL_ADDRESS, "device %d touched 0x%llx + %llu, which is not accessible", device,
                         (unsigned long long)address, (unsigned long long)size);
}

static int perform(const work *item)
{
    int code = touch(item->device, item->to, item->size);
    if (!code && item->from)
        code = touch(item->device, item->from, item->size);
    if (code)
        return code;
    if (item->from)
        memmove((void *)item->to, (const void *)item->from, item->size);
    else
        memset((void *)item->to, item->value, item->size);
    return SIM_OK;
}

/* The legacy default stream and blocking streams wait for one another; a non-blocking stream waits for nobody. */
static bool ordered_before(const work *item, int device, uint64_t id)
{
    stream *waited = find_stream(id), *other = find_stream(item->stream);
    if (item->device != device)
        return false;
    if (item->stream == id)
        return true;
    return !(waited && waited->non_blocking) && !(other && other->non_blocking) && (!id || !item->stream);
}

static int run(int device, uint64_t id, bool everything)
{
    int first = SIM_OK;
    for (work **link = &queue; *link;) {
        work *item = *link;
        int code;
        if (item->device != device || (!everything && !ordered_before(item, device, id))) {
            link = &item->next;
            continue;
        }
        *link = item->next;
        code = perform(item);
        first = first ? first : code;
        free(item);
    }
    return first;
}

int sim_stream_wait(uint64_t id)
{
    int code = check_stream(id);
    return code ? code : run(sim_current_device(), id, false);
}

int sim_device_wait(int device) { return run(device, 0, true); }

int sim_stream_destroy(uint64_t id)
{
    int code = id ? check_stream(id) : sim_violation(SIM_INVALID_HANDLE, "destroyed the default stream");
    if (code)
        return code;
    code = run(sim_current_device(), id, false);
    for (stream **link = &streams; *link; link = &(*link)->next)
        if ((*link)->id == id) {
            stream *gone = *link;
            *link = gone->next;
            free(gone);
            break;
        }
    return code;
}

bool sim_work_pending(uint64_t address, uint64_t size)
{
    for (work *item = queue; item; item = item->next)
        if ((address < item->to + item->size && item->to < address + size) ||
            (item->from && address < item->from + item->size && item->from < address + size))
            return true;
    return false;
}

static int enqueue(work item)
{
    work **end = &queue, *copy;
    int code = check_stream(item.stream);
    if (!code && !item.stream && sim.capturing) {
        sim.capture_broken = true;
        code = sim_violation(SIM_CAPTURE_IMPLICIT, "work on the default stream while a stream is captured");
    }
    item.device = sim_current_device();
    if (!code && item.size)
        code = touch(item.device, item.to, item.size);
    if (!code && item.size && item.from)
        code = touch(item.device, item.from, item.size);
    if (code || !item.size)
        return code;
    if (!sim_option("defer"))
        return perform(&item);
    while (*end)
        end = &(*end)->next;
    copy = malloc(sizeof *copy);
    *copy = item;
    copy->next = NULL;
    *end = copy;
    return SIM_OK;
}

int sim_fill(uint64_t address, unsigned char value, size_t size, uint64_t id)
{
    return enqueue((work){.to = address, .value = value, .size = size, .stream = id});
}

int sim_copy(uint64_t to, uint64_t from, size_t size, uint64_t id)
{
    return enqueue((work){.to = to, .from = from, .size = size, .stream = id});
}

int sim_copy_host(void *host, uint64_t address, size_t size, bool to_host)
{
    int device = sim_current_device(), code = run(device, 0, false);
    if (!code)
        code = touch(device, address, size);
    if (code)
        return code;
    if (to_host)
        memcpy(host, (const void *)address, size);
    else
        memcpy((void *)address, host, size);
    return SIM_OK;
}
