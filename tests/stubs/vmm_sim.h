/* A GPU's virtual memory, simulated over memory files and mmap, and stricter than the real thing.
 *
 * The two stub driver libraries (cuda_stub.c, hip_stub.c) are thin front ends over this.  Addresses are host addresses:
 * a reservation is PROT_NONE, a mapping stays PROT_NONE until access is set, so touching memory that is not backed
 * faults.  Fresh memory is filled with a pattern, work on streams is done only when somebody waits for it, and each
 * misuse is recorded as a violation and answered with the code the real driver would give.
 *
 * Result codes are those that CUDA and HIP share (cuda.h 13.0 CUresult; hip_runtime_api.h hipError_t).
 * Every sim_* function runs between sim_enter and sim_leave, which hold the one lock. */
#ifndef VMM_SIM_H
#define VMM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_DEVICES 2
#define SIM_EXPORT __attribute__((visibility("default")))
#define SIM_POISON 0xA5

enum {
    SIM_OK = 0,
    SIM_INVALID_VALUE = 1,
    SIM_OUT_OF_MEMORY = 2,
    SIM_NOT_INITIALIZED = 3,
    SIM_INVALID_DEVICE = 101,
    SIM_INVALID_CONTEXT = 201,
    SIM_INVALID_HANDLE = 400,
    SIM_ILLEGAL_ADDRESS = 700,
    SIM_NOT_SUPPORTED = 801,
    SIM_CAPTURE_UNSUPPORTED = 900,
    SIM_CAPTURE_IMPLICIT = 906,
    SIM_UNKNOWN = 999
};

/* What a call needs, for sim_enter. */
enum { SIM_NEEDS_INIT = 1, SIM_NEEDS_CONTEXT = 2, SIM_UNSAFE_IN_CAPTURE = 4, SIM_FORBIDDEN_IN_CAPTURE = 8 };

/* Handle types, one bit each, as both vendors number them. */
enum { SIM_HANDLE_NONE = 0, SIM_HANDLE_FD = 1, SIM_HANDLE_FABRIC = 8 };

typedef struct sim_thread {
    int stack[16]; /* devices whose context was pushed; the top is current */
    int depth;
    int pushes; /* minus pops: what this thread pushed and did not pop */
    int capture_mode;
} sim_thread;

typedef struct sim_handle {
    uint64_t id;
    uint64_t size, charge; /* charge: what it takes from the device, 0 for an imported one */
    int device, file;
    int references, mappings;
    unsigned handle_types;
    bool rdma;
    uint64_t last_reservation;
    struct sim_handle *next;
} sim_handle;

typedef struct sim_mapping {
    uint64_t address, size;
    sim_handle *handle;
    unsigned access[SIM_DEVICES]; /* 0 none, 1 read, 3 read and write */
    struct sim_mapping *next;
} sim_mapping;

/* Also plain allocations (is_allocation), which are always accessible from their device. */
typedef struct sim_range {
    uint64_t address, size;
    uint64_t held; /* bytes that come back only when the range is freed */
    int device;
    bool is_allocation, broken;
    struct sim_range *next;
} sim_range;

typedef struct sim_device {
    uint64_t total, used, neighbour;
    int context_references;
    bool dead; /* a sticky error killed the context */
} sim_device;

typedef struct sim_state {
    sim_device devices[SIM_DEVICES];
    sim_handle *handles;
    sim_mapping *mappings;
    sim_range *ranges;
    uint64_t next_handle;
    uint64_t capture; /* which one, the first is 1 */
    bool initialized, forked, capturing, capture_broken;
} sim_state;

extern sim_state sim;

/* vmm_control.c: the lock, fault injection, options, violations, the report. */
int sim_enter(const char *call, unsigned needs);
int sim_leave(int code);
int sim_violation(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int64_t sim_option(const char *name);
int sim_attribute(int attribute, int *value, int fallback); /* what a test has set, else the fallback */
sim_thread *sim_this_thread(void);
int sim_current_device(void); /* -1: no context */

void sim_lock(void);
void sim_unlock(void);
#define LOCKED(statement)                                                                                              \
    do {                                                                                                               \
        sim_lock();                                                                                                    \
        statement;                                                                                                     \
        sim_unlock();                                                                                                  \
    } while (0)

/* vmm_rules.c: the code that a rule makes this call answer, else 0. */
int sim_apply_rules(const char *call);
bool sim_matches(const char *pattern, const char *call);
void sim_clear_rules(void);

/* vmm_space.c: reservations, allocations; vmm_map.c: handles, mappings, access. */
int sim_granularity(int device, unsigned handle_types, bool recommended, size_t *granularity);
int sim_reserve(uint64_t *address, size_t size, size_t alignment, uint64_t hint);
int sim_unreserve(uint64_t address, size_t size);
int sim_create(uint64_t *id, size_t size, int device, unsigned handle_types, bool rdma);
int sim_release(uint64_t id);
int sim_map(uint64_t address, size_t size, size_t offset, uint64_t id);
int sim_unmap(uint64_t address, size_t size);
int sim_set_access(uint64_t address, size_t size, int device, unsigned flags);
/* vmm_share.c */
int sim_export(uint64_t id, unsigned handle_type, void *shareable);
int sim_import(uint64_t *id, unsigned handle_type, void *shareable);
int sim_retain(uint64_t *id, uint64_t address);
/* vmm_space.c again */
int sim_allocate(uint64_t *address, size_t size);
int sim_free(uint64_t address);
int sim_memory_info(size_t *free_bytes, size_t *total_bytes);
sim_handle *sim_find_handle(uint64_t id);
sim_handle *sim_add_handle(int file, uint64_t size, uint64_t charge, int device, unsigned handle_types, bool rdma);
sim_mapping *sim_find_mapping(uint64_t address);
sim_range *sim_find_range(uint64_t address);
bool sim_accessible(int device, uint64_t address, uint64_t size);

/* vmm_work.c: streams and the work on them.  Stream 0 is the legacy default stream. */
int sim_stream_create(uint64_t *stream, bool non_blocking);
int sim_stream_destroy(uint64_t stream);
int sim_stream_wait(uint64_t stream);
int sim_device_wait(int device);
int sim_fill(uint64_t address, unsigned char value, size_t size, uint64_t stream);
int sim_copy(uint64_t to, uint64_t from, size_t size, uint64_t stream);
int sim_copy_host(void *host, uint64_t address, size_t size, bool to_host); /* waits, as a pageable copy does */
bool sim_work_pending(uint64_t address, uint64_t size);
size_t sim_live_streams(void);

#endif
