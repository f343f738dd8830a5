/* Physical handles of the simulated devices, their mappings and access rights.  See vmm_sim.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "vmm_sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t granule(void) { return (uint64_t)sim_option("granularity"); }
static uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

sim_handle *sim_find_handle(uint64_t id)
{
    for (sim_handle *handle = sim.handles; handle; handle = handle->next)
        if (handle->id == id)
            return handle;
    return NULL;
}

/* New memory never reads as zero: whole when it is small, both ends of each 64 KiB when it is large. */
static void poison(int file, uint64_t size)
{
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return;
    if (size <= 8u << 20)
        memset(memory, SIM_POISON, size);
    else
        for (uint64_t at = 0; at < size; at += 65536)
            memory[at] = memory[at + 65535] = (char)SIM_POISON;
    munmap(memory, size);
}

sim_handle *sim_add_handle(int file, uint64_t size, uint64_t charge, int device, unsigned types, bool rdma)
{
    sim_handle *handle = calloc(1, sizeof *handle);
    *handle = (sim_handle){.id = 0x7100 + 0x10 * ++sim.next_handle, .size = size, .charge = charge, .device = device,
                           .file = file, .references = 1, .handle_types = types, .rdma = rdma, .next = sim.handles};
    sim.devices[device].used += charge;
    sim.handles = handle;
    return handle;
}

int sim_create(uint64_t *id, size_t size, int device, unsigned handle_types, bool rdma)
{
    uint64_t page = (uint64_t)sim_option("page_bytes"), charge;
    size_t unit = 0;
    int file, code;
    if (device < 0 || device >= SIM_DEVICES)
        return sim_violation(SIM_INVALID_DEVICE, "memory created on device %d", device);
    if (handle_types & ~(unsigned)(SIM_HANDLE_FD | SIM_HANDLE_FABRIC))
        return SIM_NOT_SUPPORTED;
    if (rdma && sim_option("rdma_code"))
        return (int)sim_option("rdma_code");
    code = sim_granularity(device, handle_types, false, &unit);
    if (code)
        return code;
    if (!id || !size || size % unit)
        return sim_violation(SIM_INVALID_VALUE, "created %zu bytes, not a multiple of %zu", size, unit);
    charge = round_up(size, page > granule() ? page : granule());
    if (sim.devices[device].used + sim.devices[device].neighbour + charge > sim.devices[device].total)
        return SIM_OUT_OF_MEMORY;
    file = memfd_create("vmm-sim", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size)) {
        if (file >= 0)
            close(file);
        return SIM_OUT_OF_MEMORY;
    }
    if (sim_option("poison"))
        poison(file, size);
    *id = sim_add_handle(file, size, charge, device, handle_types, rdma)->id;
    return SIM_OK;
}

static void drop_if_unused(sim_handle *handle)
{
    sim_range *range = handle->last_reservation ? sim_find_range(handle->last_reservation) : NULL;
    if (handle->references || handle->mappings)
        return;
    if (range && sim_option("hold_until_address_free")) {
        range->held += handle->charge;
        range->device = handle->device;
    } else {
        sim.devices[handle->device].used -= handle->charge;
    }
    close(handle->file);
    for (sim_handle **link = &sim.handles; *link; link = &(*link)->next)
        if (*link == handle) {
            *link = handle->next;
            break;
        }
    free(handle);
}

int sim_release(uint64_t id)
{
    sim_handle *handle = sim_find_handle(id);
    sim_range *range;
    if (!handle || !handle->references)
        return sim_violation(SIM_INVALID_VALUE, "released a handle that is not held (0x%llx)", (unsigned long long)id);
    range = handle->mappings && handle->last_reservation ? sim_find_range(handle->last_reservation) : NULL;
    if (range && sim_option("release_while_mapped_breaks_free"))
        range->broken = true;
    handle->references--;
    drop_if_unused(handle);
    return SIM_OK;
}

int sim_map(uint64_t address, size_t size, size_t offset, uint64_t id)
{
    sim_handle *handle = sim_find_handle(id);
    sim_range *range = sim_find_range(address);
    sim_mapping *mapping;
    if (!handle || !handle->references)
        return sim_violation(SIM_INVALID_VALUE, "mapped a handle that is not held (0x%llx)", (unsigned long long)id);
    if (offset || size != handle->size)
        return sim_violation(SIM_INVALID_VALUE, "mapped %zu bytes at offset %zu of a handle of %llu", size, offset,
                             (unsigned long long)handle->size);
    if (address % granule() || size % granule())
        return sim_violation(SIM_INVALID_VALUE, "mapped at 0x%llx + %zu, not aligned", (unsigned long long)address, size);
    if (!range || range->is_allocation || address + size > range->address + range->size)
        return sim_violation(SIM_INVALID_VALUE, "mapped outside of a reservation");
    for (mapping = sim.mappings; mapping; mapping = mapping->next)
        if (address < mapping->address + mapping->size && mapping->address < address + size)
            return sim_violation(SIM_INVALID_VALUE, "mapped over a mapping at 0x%llx", (unsigned long long)address);
    if (mmap((void *)address, size, PROT_NONE, MAP_FIXED | MAP_SHARED, handle->file, 0) == MAP_FAILED)
        return SIM_OUT_OF_MEMORY;
    mapping = calloc(1, sizeof *mapping);
    *mapping = (sim_mapping){.address = address, .size = size, .handle = handle, .next = sim.mappings};
    sim.mappings = mapping;
    handle->mappings++;
    handle->last_reservation = range->address;
    return SIM_OK;
}

/* How many whole mappings make up exactly [address, address + size); 0 when they do not. */
static size_t whole_mappings(uint64_t address, uint64_t size)
{
    size_t count = 0;
    uint64_t end = address + size;
    while (address < end) {
        sim_mapping *mapping = sim_find_mapping(address);
        if (!mapping || mapping->address != address || mapping->address + mapping->size > end)
            return 0;
        address += mapping->size;
        count++;
    }
    return count;
}

static void unmap_one(uint64_t address)
{
    for (sim_mapping **link = &sim.mappings; *link; link = &(*link)->next)
        if ((*link)->address == address) {
            sim_mapping *mapping = *link;
            *link = mapping->next;
            mmap((void *)address, mapping->size, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
            mapping->handle->mappings--;
            drop_if_unused(mapping->handle);
            free(mapping);
            return;
        }
}

int sim_unmap(uint64_t address, size_t size)
{
    size_t count = size ? whole_mappings(address, size) : 0;
    if (!count)
        return sim_violation(SIM_INVALID_VALUE, "unmapped 0x%llx + %zu, not a set of whole mappings",
                             (unsigned long long)address, size);
    if (sim_work_pending(address, size))
        sim_violation(SIM_ILLEGAL_ADDRESS, "unmapped memory that enqueued work still uses");
    if (count > 1 && sim_option("range_unmap_breaks_free"))
        sim_find_range(address)->broken = true;
    for (uint64_t at = address; at < address + size;) {
        uint64_t next = at + sim_find_mapping(at)->size;
        unmap_one(at);
        at = next;
    }
    return SIM_OK;
}

/* ROCm 7.2 and before added up sizes from the reservation's first mapping, not from the address asked for
 * (rocm-systems pull request 6977), and refused when no partial sum was the size. */
static bool first_sum_hits(uint64_t address, uint64_t size)
{
    uint64_t at = sim_find_range(address)->address, end = at + sim_find_range(address)->size, sum = 0;
    while (at < end && sum < size) {
        sim_mapping *mapping = sim_find_mapping(at);
        sum += mapping ? mapping->size : 0;
        at += mapping ? mapping->size : granule();
    }
    return sum == size;
}

int sim_set_access(uint64_t address, size_t size, int device, unsigned flags)
{
    static uint64_t calls;
    uint64_t every = (uint64_t)sim_option("set_access_fails_every");
    if (device < 0 || device >= SIM_DEVICES)
        return sim_violation(SIM_INVALID_DEVICE, "access for device %d", device);
    if (flags != 0 && flags != 1 && flags != 3)
        return sim_violation(SIM_INVALID_VALUE, "access flags %u", flags);
    if (!size || !whole_mappings(address, size))
        return sim_violation(SIM_INVALID_VALUE, "access set on 0x%llx + %zu, not a set of whole mappings",
                             (unsigned long long)address, size);
    if (every && ++calls % every == 0)
        return SIM_INVALID_VALUE;
    if (sim_option("set_access_first_sum") && !first_sum_hits(address, size))
        return SIM_INVALID_VALUE;
    for (uint64_t at = address; at < address + size;) {
        sim_mapping *mapping = sim_find_mapping(at);
        unsigned all = 0;
        mapping->access[device] = flags;
        for (int other = 0; other < SIM_DEVICES; other++)
            all |= mapping->access[other];
        mprotect((void *)at, mapping->size, (all & 1 ? PROT_READ : 0) | (all & 2 ? PROT_WRITE : 0));
        at += mapping->size;
    }
    return SIM_OK;
}
