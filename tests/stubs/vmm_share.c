/* Sharing handles with other processes, and finding the handle behind an address.  See vmm_sim.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "vmm_sim.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct fabric_token {
    uint64_t magic;
    int process, file;
    char padding[48];
} fabric_token;
_Static_assert(sizeof(fabric_token) == 64, "CUmemFabricHandle is 64 bytes");
#define FABRIC_MAGIC 0x6b76666162726963ull

int sim_export(uint64_t id, unsigned handle_type, void *shareable)
{
    sim_handle *handle = sim_find_handle(id);
    if (!handle || !handle->references || !shareable)
        return sim_violation(SIM_INVALID_VALUE, "exported a handle that is not held");
    if (!handle_type || (handle->handle_types & handle_type) != handle_type)
        return sim_violation(SIM_INVALID_VALUE, "exported as type %u, was created for %u", handle_type,
                             handle->handle_types);
    if (handle_type == SIM_HANDLE_FD) {
        int file = fcntl(handle->file, F_DUPFD_CLOEXEC, 0);
        if (file < 0)
            return SIM_OUT_OF_MEMORY;
        memcpy(shareable, &file, sizeof file);
    } else {
        fabric_token token = {.magic = FABRIC_MAGIC, .process = (int)getpid(), .file = handle->file};
        memcpy(shareable, &token, sizeof token);
    }
    return SIM_OK;
}

int sim_import(uint64_t *id, unsigned handle_type, void *shareable)
{
    struct stat status;
    int file = -1, device = sim_current_device();
    if (!id || !shareable)
        return sim_violation(SIM_INVALID_VALUE, "imported nothing");
    if (handle_type == SIM_HANDLE_FD) {
        file = fcntl((int)(intptr_t)shareable, F_DUPFD_CLOEXEC, 0);
    } else if (handle_type == SIM_HANDLE_FABRIC) {
        fabric_token token;
        char path[64];
        memcpy(&token, shareable, sizeof token);
        if (token.magic != FABRIC_MAGIC)
            return sim_violation(SIM_INVALID_VALUE, "imported a fabric handle that is none");
        snprintf(path, sizeof path, "/proc/%d/fd/%d", token.process, token.file);
        file = open(path, O_RDWR | O_CLOEXEC);
    }
    if (file < 0 || fstat(file, &status) || !status.st_size || (uint64_t)status.st_size % (uint64_t)sim_option("granularity")) {
        if (file >= 0)
            close(file);
        return sim_violation(SIM_INVALID_VALUE, "imported something that is no shared memory");
    }
    *id = sim_add_handle(file, (uint64_t)status.st_size, 0, device, handle_type, false)->id;
    return SIM_OK;
}

int sim_retain(uint64_t *id, uint64_t address)
{
    sim_mapping *mapping = sim_find_mapping(address);
    if (!id || !mapping)
        return SIM_INVALID_VALUE; /* a way to ask whether an address is mapped: no misuse */
    mapping->handle->references++;
    *id = mapping->handle->id;
    return SIM_OK;
}
