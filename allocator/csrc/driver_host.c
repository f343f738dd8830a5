/* Host driver: reservations are PROT_NONE mappings, handles are memory files, and access is mprotect.  An address that
 * is not backed faults, as it does on a GPU.  Memory is taken from the machine when it is created (fallocate), not when
 * it is touched, so a commit that succeeds is memory that is there.
 *
 * Mappings are MADV_DONTFORK: a child never sees the parent's memory (invariant 10). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "host_memory.h"
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t granule = 2u << 20;
static uint64_t budget;  /* 0: whatever the machine has available */
static uint64_t created; /* bytes of live handles */
static bool in_use;

static int configure(uint64_t granularity, uint64_t budget_bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (granularity) {
        if (granularity % page || granularity & (granularity - 1))
            return ekv_error(EKV_INVALID, "host: granularity %llu is not a power of two of at least %llu bytes",
                             (unsigned long long)granularity, (unsigned long long)page);
        granule = granularity;
    }
    budget = budget_bytes;
    return EKV_OK;
}

int ekv_host_configure(uint64_t granularity, uint64_t budget_bytes)
{
    uint64_t reserved;
    int status = ekv_enter();
    if (status)
        return status;
    reserved = ekv_reserved_bytes_locked(EKV_HOST, 0);
    if (reserved && granularity && granularity != granule)
        status = ekv_error(EKV_INVALID,
                           "host: the granularity is %llu bytes and cannot become %llu while %llu bytes are reserved",
                           (unsigned long long)granule, (unsigned long long)granularity,
                           (unsigned long long)reserved);
    else
        status = configure(granularity, budget_bytes);
    ekv_leave();
    return status;
}

static int read_environment(const char *name, uint64_t *value)
{
    const char *text = getenv(name);
    char *end;
    if (!text || !*text)
        return EKV_OK;
    errno = 0;
    *value = strtoull(text, &end, 10);
    if (errno || *end || *text < '0' || *text > '9')
        return ekv_error(EKV_INVALID, "host: %s='%s' is not a number of bytes", name, text);
    return EKV_OK;
}

static int host_open(ekv_device *device)
{
    uint64_t granularity = 0, budget_bytes = budget;
    int status;
    if (device->ordinal != 0)
        return ekv_error(EKV_INVALID, "host: device %d does not exist, there is only device 0", device->ordinal);
    if (in_use)
        return 0;
    status = read_environment("EKV_HOST_GRANULARITY", &granularity);
    if (!status && !budget)
        status = read_environment("EKV_HOST_BUDGET", &budget_bytes);
    if (!status)
        status = configure(granularity, budget_bytes);
    in_use = !status;
    return status;
}

static int host_granularity(ekv_device *device, int handle_kind, bool recommended, uint64_t *granularity)
{
    (void)recommended;
    if (handle_kind > EKV_HANDLE_FD)
        return ekv_fail(device, "granularity", ENOTSUP, 0, 0);
    *granularity = granule;
    return 0;
}

static int forget_on_fork(ekv_device *device, void *address, uint64_t size)
{
    int code;
    if (!madvise(address, size, MADV_DONTFORK))
        return 0;
    code = errno;
    return ekv_fail(device, "madvise", code, (uint64_t)address, size);
}

static int host_reserve(ekv_device *device, uint64_t size, uint64_t alignment, uint64_t *address)
{
    char *raw, *base;
    int code;
    if (size > UINT64_MAX / 2 - alignment)
        return ekv_fail(device, "mmap", ENOMEM, 0, size);
    raw = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return ekv_fail(device, "mmap", errno, 0, size);
    base = (char *)(((uint64_t)raw + alignment - 1) / alignment * alignment);
    if (base > raw)
        munmap(raw, (size_t)(base - raw));
    if (base + size < raw + size + alignment)
        munmap(base + size, (size_t)(raw + alignment - base));
    code = forget_on_fork(device, base, size);
    if (code) {
        munmap(base, size);
        return code;
    }
    *address = (uint64_t)base;
    return 0;
}

static int host_memory_info(ekv_device *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    (void)device;
    if (budget) {
        *total_bytes = budget;
        *free_bytes = created < budget ? budget - created : 0;
    } else {
        ekv_machine_memory(free_bytes, total_bytes);
    }
    return 0;
}

/* The default soft limit of 1,024 open files is less than two chunks for each of 640 segments. */
static int memory_file(void)
{
    struct rlimit limit;
    int file = memfd_create("extensible-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file >= 0 || errno != EMFILE || getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= limit.rlim_max)
        return file;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit))
        return -1;
    return memfd_create("extensible-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

static int host_create(ekv_device *device, int handle_kind, uint64_t size, ekv_handle *handle)
{
    uint64_t free_bytes, total_bytes;
    int file, code;
    (void)handle_kind; /* every handle is a file descriptor already */
    file = memory_file(); /* first, since it raises the limit of open files that reading takes some of */
    if (file < 0)
        return ekv_fail(device, "memfd_create", errno, 0, size);
    host_memory_info(device, &free_bytes, &total_bytes);
    if (size > free_bytes) {
        close(file);
        return ekv_fail(device, "create", ENOMEM, 0, size);
    }
    do
        code = fallocate(file, 0, 0, (off_t)size) ? errno : 0;
    while (code == EINTR);
    if (code) {
        close(file);
        return ekv_fail(device, "fallocate", code == ENOSPC ? ENOMEM : code, 0, size);
    }
    created += size;
    *handle = (ekv_handle)file;
    return 0;
}

/* The range back to what reserve made of it. */
static bool hide(uint64_t address, uint64_t size)
{
    void *mapped = mmap((void *)address, size, PROT_NONE,
                        MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return mapped != MAP_FAILED;
}

static int host_map(ekv_device *device, uint64_t address, uint64_t size, ekv_handle handle)
{
    void *mapped = mmap((void *)address, size, PROT_NONE, MAP_FIXED | MAP_SHARED, (int)handle, 0);
    int code;
    if (mapped == MAP_FAILED)
        return ekv_fail(device, "mmap", errno, address, size);
    code = forget_on_fork(device, mapped, size);
    if (code)
        hide(address, size);
    return code;
}

static int host_set_access(ekv_device *device, uint64_t address, uint64_t size)
{
    if (mprotect((void *)address, size, PROT_READ | PROT_WRITE))
        return ekv_fail(device, "mprotect", errno, address, size);
    return 0;
}

static int host_unmap(ekv_device *device, uint64_t address, uint64_t size)
{
    if (!hide(address, size))
        return ekv_fail(device, "munmap", errno, address, size);
    return 0;
}

/* Linux has closed the descriptor also when close says that it failed: closing it again could close somebody else's. */
static int host_release(ekv_device *device, ekv_handle handle, uint64_t size)
{
    int sealed = ftruncate((int)handle, 0); /* a child forked meanwhile has the file too: it shall not keep memory */
    (void)device;
    (void)sealed; /* exported: the other side keeps it */
    close((int)handle);
    created -= size;
    return 0;
}

static int host_unreserve(ekv_device *device, uint64_t address, uint64_t size)
{
    if (munmap((void *)address, size))
        return ekv_fail(device, "munmap", errno, address, size);
    return 0;
}

static int host_zero(ekv_device *device, uint64_t address, uint64_t size)
{
    (void)device;
    memset((void *)address, 0, size);
    return 0;
}

static int host_stream_wait(ekv_device *device, void *stream)
{
    (void)device;
    (void)stream;
    return 0;
}

static int host_capture_id(ekv_device *device, void *stream, uint64_t *id)
{
    (void)device;
    (void)stream;
    *id = 0;
    return 0;
}

static int host_nothing_to_wait_for(ekv_device *device)
{
    (void)device;
    return 0;
}

static int host_gpu_direct_rdma(ekv_device *device, bool *capable)
{
    (void)device;
    *capable = false;
    return 0;
}

static int host_export_file(ekv_device *device, ekv_handle handle, int *file)
{
    fcntl((int)handle, F_ADD_SEALS, F_SEAL_SHRINK); /* from now on release must not take the memory away */
    *file = fcntl((int)handle, F_DUPFD_CLOEXEC, 0);
    return *file < 0 ? ekv_fail(device, "fcntl", errno, 0, 0) : 0;
}

/* A file that another process made smaller would fault on touch: its size is checked. */
static int host_import_file(ekv_device *device, int file, uint64_t size, ekv_handle *handle)
{
    struct stat status;
    int own;
    if (fstat(file, &status))
        return ekv_fail(device, "fstat", errno, 0, size);
    if ((uint64_t)status.st_size != size)
        return ekv_fail(device, "import", EINVAL, 0, size);
    own = fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return ekv_fail(device, "fcntl", errno, 0, size);
    created += size;
    *handle = (ekv_handle)own;
    return 0;
}

static int host_allocate(ekv_device *device, uint64_t size, uint64_t *address)
{
    void *memory = NULL;
    int code = posix_memalign(&memory, 4096, size);
    if (code)
        return ekv_fail(device, "posix_memalign", code, 0, size);
    *address = (uint64_t)memory;
    return 0;
}

static int host_free(ekv_device *device, uint64_t address)
{
    (void)device;
    free((void *)address);
    return 0;
}

static const char *host_error_name(int code)
{
    const char *name = strerrorname_np(code);
    return name ? name : "unknown error";
}

const ekv_driver ekv_host_driver = {
    .name = "host",
    .kind = EKV_HOST,
    .out_of_memory_code = ENOMEM,
    .fresh_memory_is_zero = true,
    .open = host_open,
    .granularity = host_granularity,
    .reserve = host_reserve,
    .create = host_create,
    .map = host_map,
    .set_access = host_set_access,
    .unmap = host_unmap,
    .release = host_release,
    .unreserve = host_unreserve,
    .zero = host_zero,
    .zero_wait = host_nothing_to_wait_for,
    .stream_wait = host_stream_wait,
    .capture_id = host_capture_id,
    .synchronize = host_nothing_to_wait_for,
    .memory_info = host_memory_info,
    .gpu_direct_rdma = host_gpu_direct_rdma,
    .export_file = host_export_file,
    .import_file = host_import_file,
    .allocate = host_allocate,
    .free = host_free,
    .error_name = host_error_name,
};
