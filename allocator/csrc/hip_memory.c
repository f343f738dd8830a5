/* Addresses, handles, mappings and access of the HIP driver.  What it does beyond the calls follows what ROCm users
 * report:
 * - handles are multiples of 2 MiB (EKV_HIP_GRANULARITY) and of the recommended granularity: the minimum of 4 KiB is
 *   rounded up to bigger pages behind one's back, and each handle costs a file descriptor (rocm-systems issue 10604, pull
 *   request 9360);
 * - access is set mapping by mapping, again when it is refused, then over the run of mappings that ends there
 *   (rocm-systems issues 2516 and 2667, pull request 6977, llama.cpp pull request 23900);
 * - a reservation is retried without an alignment (vLLM pull request 43022);
 * - where the memory of an empty reservation has not come back, its address range is freed and taken again
 *   (legacy-rocm-build issue 6021). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "hip.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ACCESS_ATTEMPTS = 6, RESERVE_ATTEMPTS = 4, FIRST_VERSION_THAT_IMPORTS_BY_VALUE = 70100000 };

ekv_hip_prop ekv_hip_properties(const ekv_device *device, int handle_kind)
{
    ekv_hip_prop prop;
    memset(&prop, 0, sizeof prop);
    prop.type = 1;
    prop.location = (ekv_hip_location){1, device->ordinal};
    if (handle_kind == EKV_HANDLE_FABRIC)
        prop.requested_handle_types = TYPE_FABRIC;
    else if (handle_kind != EKV_HANDLE_NONE)
        prop.requested_handle_types = TYPE_FD;
    prop.alloc_flags.gpu_direct_rdma_capable = handle_kind == EKV_HANDLE_FD_RDMA || handle_kind == EKV_HANDLE_FABRIC;
    return prop;
}

/* What the driver has to remember of its reservations and handles.  Nothing is allocated between creating a handle and
 * releasing it, so that undoing cannot run out of memory. */
typedef struct range {
    uint64_t address, size;
    size_t num_handles;  /* live ones that are mapped here, or were last */
    size_t num_mapped;
    uint64_t free_before, given_back; /* since the range became empty */
    bool lost;                        /* somebody else took the addresses while they were free */
    struct range *next;
} range;

typedef struct backing {
    ekv_handle handle;
    uint64_t size, address; /* address 0: not mapped */
    bool imported;          /* its memory is another process's */
    range *range;
    struct backing *next;
} backing;

static range *ranges;
static backing *backings;

static range *range_at(uint64_t address)
{
    range *each = ranges;
    while (each && !(address >= each->address && address < each->address + each->size))
        each = each->next;
    return each;
}

static backing *backing_of(ekv_handle handle)
{
    backing *each = backings;
    while (each && each->handle != handle)
        each = each->next;
    return each;
}

static backing *backing_at(uint64_t address)
{
    backing *each = backings;
    while (each && each->address != address)
        each = each->next;
    return each;
}

static backing *backing_before(uint64_t address)
{
    backing *each = backings;
    while (each && !(each->address && each->address + each->size == address))
        each = each->next;
    return each;
}

static int reserve_at(uint64_t size, uint64_t alignment, uint64_t hint, uint64_t *address)
{
    void *base = NULL;
    int code = ekv_hip_quietly(ekv_hip.address_reserve(&base, size, alignment, (void *)hint, 0));
    if (code == HIP_ERROR_INVALID_VALUE && alignment)
        code = ekv_hip_quietly(ekv_hip.address_reserve(&base, size, 0, (void *)hint, 0));
    *address = (uint64_t)base;
    if (!code && alignment && *address % alignment) {
        ekv_hip_quietly(ekv_hip.address_free(base, size));
        code = HIP_ERROR_INVALID_VALUE;
    }
    return code;
}

int ekv_hip_reserve(ekv_device *device, uint64_t size, uint64_t alignment, uint64_t *address)
{
    range *added = calloc(1, sizeof *added);
    ekv_hip_scope s;
    int code;
    if (!added)
        return ekv_fail(device, "malloc", HIP_ERROR_OUT_OF_MEMORY, 0, sizeof *added);
    code = ekv_hip_enter(device, &s);
    if (!code) {
        code = reserve_at(size, alignment, 0, address);
        if (code)
            ekv_fail(device, "hipMemAddressReserve", code, 0, size);
    }
    ekv_hip_leave(&s);
    if (code) {
        free(added);
        return code;
    }
    *added = (range){.address = *address, .size = size, .next = ranges};
    ranges = added;
    return 0;
}

static void take_again(range *r)
{
    uint64_t address = 0;
    for (int i = 0; i < RESERVE_ATTEMPTS && r->lost; i++) {
        if (reserve_at(r->size, 0, r->address, &address))
            continue;
        r->lost = address != r->address;
        if (r->lost)
            ekv_hip_quietly(ekv_hip.address_free((void *)address, r->size));
    }
}

/* The last handle of an empty reservation was released: see whether its memory came back. */
static void see_memory_come_back(range *r)
{
    size_t free_bytes = 0, total_bytes;
    bool held = r->given_back && !ekv_hip_quietly(ekv_hip.get_info(&free_bytes, &total_bytes)) &&
                (free_bytes < r->free_before || free_bytes - r->free_before < r->given_back / 2);
    r->given_back = 0;
    if (!held || ekv_hip_quietly(ekv_hip.address_free((void *)r->address, r->size)))
        return;
    r->lost = true;
    take_again(r);
}

/* Before ROCm 7.1 the descriptor was passed by address (PyTorch's CUDASymmetricMemory.cu tells them apart too). */
static bool imports_by_value(void)
{
    int version = 0;
    return ekv_hip_quietly(ekv_hip.runtime_version(&version)) || version >= FIRST_VERSION_THAT_IMPORTS_BY_VALUE;
}

/* A handle that is new here: created where prop is given, imported from file where it is not. */
static int take_handle(ekv_device *device, const ekv_hip_prop *prop, int file, uint64_t size, ekv_handle *handle)
{
    backing *added = calloc(1, sizeof *added);
    ekv_hip_scope s;
    int code;
    if (!added)
        return ekv_fail(device, "malloc", HIP_ERROR_OUT_OF_MEMORY, 0, sizeof *added);
    code = ekv_hip_enter(device, &s);
    if (!code && prop)
        code = CALL(device, hipMemCreate, 0, size, create(handle, size, prop, 0));
    else if (!code)
        code = CALL(device, hipMemImportFromShareableHandle, 0, size,
                    import_handle(handle, imports_by_value() ? (void *)(intptr_t)file : &file, TYPE_FD));
    ekv_hip_leave(&s);
    if (code) {
        free(added);
        return code;
    }
    *added = (backing){.handle = *handle, .size = size, .imported = !prop, .next = backings};
    backings = added;
    return 0;
}

int ekv_hip_create(ekv_device *device, int handle_kind, uint64_t size, ekv_handle *handle)
{
    ekv_hip_prop prop = ekv_hip_properties(device, handle_kind);
    return take_handle(device, &prop, -1, size, handle);
}

int ekv_hip_import_file(ekv_device *device, int file, uint64_t size, ekv_handle *handle)
{
    return take_handle(device, NULL, file, size, handle);
}

int ekv_hip_map(ekv_device *device, uint64_t address, uint64_t size, ekv_handle handle)
{
    backing *item = backing_of(handle);
    range *target = range_at(address);
    ekv_hip_scope s;
    int code = ekv_hip_enter(device, &s);
    if (!code && target->lost) {
        take_again(target);
        if (target->lost)
            code = ekv_error(EKV_DRIVER_FAILED,
                             "hip: the addresses from 0x%llx on, %llu bytes, were freed to give their memory back, and "
                             "something else in this process has taken them",
                             (unsigned long long)target->address, (unsigned long long)target->size);
    }
    if (!code)
        code = CALL(device, hipMemMap, address, size, map((void *)address, size, 0, handle, 0));
    ekv_hip_leave(&s);
    if (code)
        return code;
    if (item->range != target) {
        if (item->range)
            item->range->num_handles--;
        target->num_handles++;
    }
    target->num_mapped++;
    item->range = target;
    item->address = address;
    return 0;
}

static int set_access_of(ekv_device *device, const backing *item)
{
    ekv_hip_access access = {{1, device->ordinal}, 3};
    uint64_t begin = item->address, end = item->address + item->size;
    int code = 0;
    for (int i = 0; i < ACCESS_ATTEMPTS; i++) {
        code = ekv_hip_quietly(ekv_hip.set_access((void *)begin, item->size, &access, 1));
        if (code != HIP_ERROR_INVALID_VALUE)
            break;
        usleep(500u << i);
    }
    if (code == HIP_ERROR_INVALID_VALUE) {
        for (backing *before = backing_before(begin); before && before->range == item->range;
             before = backing_before(begin))
            begin = before->address;
        code = ekv_hip_quietly(ekv_hip.set_access((void *)begin, end - begin, &access, 1));
    }
    return code ? ekv_fail(device, "hipMemSetAccess", code, item->address, item->size) : 0;
}

int ekv_hip_set_access(ekv_device *device, uint64_t address, uint64_t size)
{
    ekv_hip_scope s;
    int code = ekv_hip_enter(device, &s);
    for (uint64_t at = address; !code && at < address + size;) {
        const backing *item = backing_at(at);
        code = set_access_of(device, item);
        at += item->size;
    }
    ekv_hip_leave(&s);
    return code;
}

int ekv_hip_unmap(ekv_device *device, uint64_t address, uint64_t size)
{
    backing *item = backing_at(address);
    ekv_hip_scope s;
    int code = ekv_hip_enter(device, &s);
    if (!code)
        code = CALL(device, hipMemUnmap, address, size, unmap((void *)address, size));
    if (!code) {
        size_t total_bytes, free_bytes = 0;
        item->address = 0;
        if (--item->range->num_mapped == 0) {
            item->range->given_back = 0;
            item->range->free_before = ekv_hip_quietly(ekv_hip.get_info(&free_bytes, &total_bytes)) ? 0 : free_bytes;
        }
    }
    ekv_hip_leave(&s);
    return code;
}

int ekv_hip_release(ekv_device *device, ekv_handle handle, uint64_t size)
{
    backing *item = backing_of(handle), **link = &backings;
    ekv_hip_scope s;
    int code = ekv_hip_enter(device, &s);
    if (!code)
        code = CALL(device, hipMemRelease, 0, size, release(handle));
    if (!code) {
        bool imported = item->imported;
        range *r = item->range;
        while (*link != item)
            link = &(*link)->next;
        *link = item->next;
        free(item);
        if (r) {
            r->given_back += imported ? 0 : size;
            if (--r->num_handles == 0)
                see_memory_come_back(r);
        }
    }
    ekv_hip_leave(&s);
    return code;
}

int ekv_hip_unreserve(ekv_device *device, uint64_t address, uint64_t size)
{
    range *gone = range_at(address), **link = &ranges;
    ekv_hip_scope s;
    int code = ekv_hip_enter(device, &s);
    if (!code && !gone->lost)
        code = CALL(device, hipMemAddressFree, address, size, address_free((void *)address, size));
    ekv_hip_leave(&s);
    if (code)
        return code;
    while (*link != gone)
        link = &(*link)->next;
    *link = gone->next;
    free(gone);
    return 0;
}

