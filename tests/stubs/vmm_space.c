/* Address ranges of the simulated devices: reservations and plain allocations, and what lies where.  See vmm_sim.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "vmm_sim.h"

#include <stdlib.h>
#include <sys/mman.h>

static uint64_t granule(void) { return (uint64_t)sim_option("granularity"); }
static uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

sim_range *sim_find_range(uint64_t address)
{
    for (sim_range *range = sim.ranges; range; range = range->next)
        if (address >= range->address && address < range->address + range->size)
            return range;
    return NULL;
}

sim_mapping *sim_find_mapping(uint64_t address)
{
    for (sim_mapping *mapping = sim.mappings; mapping; mapping = mapping->next)
        if (address >= mapping->address && address < mapping->address + mapping->size)
            return mapping;
    return NULL;
}

bool sim_accessible(int device, uint64_t address, uint64_t size)
{
    uint64_t end = address + size;
    sim_range *range = sim_find_range(address);
    if (range && range->is_allocation)
        return end <= range->address + range->size && range->device == device;
    while (address < end) {
        sim_mapping *mapping = sim_find_mapping(address);
        if (!mapping || mapping->access[device] != 3)
            return false;
        address = mapping->address + mapping->size;
    }
    return true;
}

int sim_granularity(int device, unsigned handle_types, bool recommended, size_t *granularity)
{
    int code = (int)sim_option("granularity_code");
    if (code)
        return code;
    if (device < 0 || device >= SIM_DEVICES)
        return sim_violation(SIM_INVALID_DEVICE, "granularity asked for device %d", device);
    if (handle_types & SIM_HANDLE_FABRIC && sim_option("fabric_code"))
        return (int)sim_option("fabric_code");
    *granularity = granule();
    if (handle_types & SIM_HANDLE_FABRIC)
        *granularity *= (size_t)sim_option("fabric_granularity_factor");
    if (recommended)
        *granularity *= (size_t)sim_option("recommended_factor");
    return SIM_OK;
}

/* While hints are refused, somebody else holds the addresses that were asked for. */
static void hold_refused(uint64_t hint, size_t size)
{
    static void *taken;
    static size_t taken_bytes;
    if (taken && !sim_option("refuse_address_hint")) {
        munmap(taken, taken_bytes);
        taken = NULL;
    } else if (!taken && hint && sim_option("refuse_address_hint")) {
        taken = mmap((void *)hint, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
                     -1, 0);
        taken_bytes = size;
    }
}

int sim_reserve(uint64_t *address, size_t size, size_t alignment, uint64_t hint)
{
    uint64_t unit = granule(), limit = (uint64_t)sim_option("max_reserve_bytes"), base;
    char *raw;
    sim_range *range;
    if (!address || !size || size % unit)
        return sim_violation(SIM_INVALID_VALUE, "reserving %zu bytes, not a multiple of %llu", size,
                             (unsigned long long)unit);
    if (alignment & (alignment - 1))
        return sim_violation(SIM_INVALID_VALUE, "alignment %zu is not a power of two", alignment);
    if (limit && size > limit)
        return SIM_OUT_OF_MEMORY;
    if (alignment && sim_option("aligned_reserve_code"))
        return (int)sim_option("aligned_reserve_code");
    if (alignment < unit)
        alignment = unit;
    if (size > UINT64_MAX / 2)
        return SIM_OUT_OF_MEMORY;
    raw = MAP_FAILED;
    hold_refused(hint, size);
    if (hint && !sim_option("refuse_address_hint"))
        raw = mmap((void *)hint, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
                   -1, 0);
    base = (uint64_t)raw;
    if (raw == MAP_FAILED) {
        raw = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (raw == MAP_FAILED)
            return SIM_OUT_OF_MEMORY;
        base = round_up((uint64_t)raw, alignment);
        if (base > (uint64_t)raw)
            munmap(raw, base - (uint64_t)raw);
        if ((uint64_t)raw + alignment > base)
            munmap((void *)(base + size), (uint64_t)raw + alignment - base);
    }
    range = calloc(1, sizeof *range);
    *range = (sim_range){.address = base, .size = size, .next = sim.ranges};
    sim.ranges = range;
    *address = base;
    return SIM_OK;
}

int sim_unreserve(uint64_t address, size_t size)
{
    for (sim_range **link = &sim.ranges; *link; link = &(*link)->next) {
        sim_range *range = *link;
        if (range->address != address || range->is_allocation)
            continue;
        if (range->size != size)
            break;
        for (sim_mapping *mapping = sim.mappings; mapping; mapping = mapping->next)
            if (mapping->address >= address && mapping->address < address + size)
                return sim_violation(SIM_INVALID_VALUE, "address range freed with a mapping in it");
        if (range->broken)
            return SIM_UNKNOWN;
        for (int device = 0; device < SIM_DEVICES; device++)
            if (range->device == device)
                sim.devices[device].used -= range->held;
        munmap((void *)address, size);
        *link = range->next;
        free(range);
        return SIM_OK;
    }
    return sim_violation(SIM_INVALID_VALUE, "freed an address range that was not reserved with this base and size");
}

int sim_allocate(uint64_t *address, size_t size)
{
    int device = sim_current_device();
    uint64_t charge = round_up(size, 4096);
    sim_range *range;
    void *memory;
    if (!address || !size)
        return sim_violation(SIM_INVALID_VALUE, "allocated %zu bytes", size);
    if (sim.devices[device].used + sim.devices[device].neighbour + charge > sim.devices[device].total)
        return SIM_OUT_OF_MEMORY;
    memory = mmap(NULL, charge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return SIM_OUT_OF_MEMORY;
    range = calloc(1, sizeof *range);
    *range = (sim_range){.address = (uint64_t)memory, .size = charge, .device = device, .is_allocation = true,
                         .next = sim.ranges};
    sim.devices[device].used += charge;
    sim.ranges = range;
    *address = range->address;
    return SIM_OK;
}

int sim_free(uint64_t address)
{
    for (sim_range **link = &sim.ranges; *link; link = &(*link)->next) {
        sim_range *range = *link;
        if (range->address != address || !range->is_allocation)
            continue;
        sim_device_wait(range->device);
        sim.devices[range->device].used -= range->size;
        munmap((void *)address, range->size);
        *link = range->next;
        free(range);
        return SIM_OK;
    }
    return sim_violation(SIM_INVALID_VALUE, "freed 0x%llx, which is no allocation", (unsigned long long)address);
}

int sim_memory_info(size_t *free_bytes, size_t *total_bytes)
{
    sim_device *device = &sim.devices[sim_current_device()];
    uint64_t taken = device->used + device->neighbour;
    *free_bytes = taken < device->total ? device->total - taken : 0;
    *total_bytes = device->total;
    return SIM_OK;
}
