/* The public interface of the shim.  This file has no preprocessor directives: build.py gives it to cffi's cdef and
 * internal.h includes it for the C files, so both see the same declarations.
 *
 * Contract of every function that returns int: 0 is success, anything else is one of ekv_status and the calling
 * thread's error record (ekv_last_error) names the driver call, its code, device, address and bytes.  A failed call
 * leaves every reservation as it was.  Sizes and offsets are bytes; blocks are KV-cache blocks.  Every function may be
 * called from any thread; none calls Python, aborts or prints. */

typedef enum ekv_status {
    EKV_OK = 0,
    EKV_INVALID = 1,     /* an argument or a state is wrong: ValueError */
    EKV_OUT_OF_MEMORY = 2,
    EKV_DRIVER_FAILED = 3,
    EKV_FREED = 4,       /* the reservation was freed before */
    EKV_FORKED = 5,      /* this process was forked after the first use of a driver */
    EKV_UNSUPPORTED = 6  /* the driver or the device has no virtual memory management */
} ekv_status;

typedef enum ekv_driver_kind { EKV_HOST = 0, EKV_CUDA = 1, EKV_HIP = 2 } ekv_driver_kind;

/* What a handle can be shared as, in the order in which a shareable reservation tries them. */
typedef enum ekv_handle_kind {
    EKV_HANDLE_NONE = 0,
    EKV_HANDLE_FD = 1,      /* POSIX file descriptor */
    EKV_HANDLE_FD_RDMA = 2, /* the same, and GPUDirect RDMA capable */
    EKV_HANDLE_FABRIC = 3
} ekv_handle_kind;

enum { EKV_COMMIT_ZERO = 1, EKV_COMMIT_DEFRAGMENT = 2 };

/* Block b of the segment is the bytes [offset + b * block_stride, offset + (b + 1) * block_stride) of the reservation,
 * cut at offset + size_bytes: padding behind the last block may not be there. */
typedef struct ekv_segment {
    uint64_t offset;
    uint64_t block_stride;
    uint64_t size_bytes;
} ekv_segment;

typedef struct ekv_chunk_info {
    uint64_t offset;
    uint64_t size;
} ekv_chunk_info;

typedef struct ekv_reservation_info {
    uint64_t base;
    uint64_t size;
    uint64_t granularity;
    uint64_t physical_bytes; /* what the driver was asked for and has not been given back */
    uint64_t capacity_blocks;
    uint64_t committed_blocks;
    uint64_t released_blocks; /* what recommit will back again; 0 when not released */
    size_t num_segments;
    size_t num_chunks;
    int driver;
    int device;
    int handle_kind;
} ekv_reservation_info;

typedef struct ekv_probe_info {
    int virtual_memory;  /* a reservation was really made, backed, written and given back */
    int gpu_direct_rdma; /* the device's attribute; 0 where the query is refused */
    int handle_kind;     /* the best kind that really allocated */
    uint64_t granularity;             /* for handles that are not shareable */
    uint64_t recommended_granularity;
    uint64_t shareable_granularity;   /* for handle_kind */
} ekv_probe_info;

/* Reservations.  size_bytes is rounded up to the granularity; max_chunk_bytes 0 means one chunk per segment and commit. */
int ekv_reserve(int driver, int device, uint64_t size_bytes, uint64_t max_chunk_bytes, int shareable, uint64_t *id);
int ekv_set_segments(uint64_t id, const ekv_segment *segments, size_t num_segments, uint64_t capacity_blocks);
int ekv_commit(const uint64_t *ids, size_t num_ids, uint64_t num_blocks, int flags);
int ekv_shrink(const uint64_t *ids, size_t num_ids, uint64_t num_blocks);
int ekv_release_physical(const uint64_t *ids, size_t num_ids);
int ekv_recommit(const uint64_t *ids, size_t num_ids);
int ekv_unreserve(uint64_t id);
/* The same for an owner that cannot try again: what fails is finished at a later call.  This, ekv_retire and ekv_free
 * run in destructors, at any time: the thread's error record stays as it was. */
void ekv_drop(uint64_t id);
/* For addresses that another allocator caches (PyTorch keeps a freed torch block): retire gives the memory back and
 * ends the id, adopt starts a new id on the same addresses.  A retire that fails, or is deferred because waiting for the
 * device would spoil a stream capture, is finished at a later call. */
int ekv_retire(uint64_t id, int defer);
int ekv_adopt(uint64_t address, uint64_t max_chunk_bytes, uint64_t *id);
/* Finishes what was deferred or failed; what fails again stays for the next call. */
void ekv_collect(void);
/* Bytes of addresses on a device, retired ones included: what another allocator counts as its own. */
uint64_t ekv_reserved_bytes(int driver, int device);
int ekv_get_info(uint64_t id, ekv_reservation_info *info);
int ekv_get_chunks(uint64_t id, ekv_chunk_info *chunks, size_t capacity, size_t *num_chunks);
size_t ekv_num_reservations(void); /* without retired ones */

/* Sharing.  Export gives a file descriptor for the chunk at index, which the caller closes.  Import backs a reservation
 * that has segments and no memory with another process's chunks, read and write; the descriptors stay the caller's.
 * The blocks count as committed; their memory lives until both sides have given it back. */
int ekv_export_chunk(uint64_t id, size_t index, ekv_chunk_info *chunk, int *file);
int ekv_import_chunks(uint64_t id, const ekv_chunk_info *chunks, const int *files, size_t num_chunks,
                      uint64_t num_blocks);

/* Devices. */
int ekv_memory_info(int driver, int device, uint64_t *free_bytes, uint64_t *total_bytes);
int ekv_probe(int driver, int device, ekv_probe_info *info, char *reason, size_t reason_bytes);
/* The host driver only: the granularity while nothing is reserved (0 keeps it), the budget at any time (0: what the
 * machine has).  At the first use the environment's EKV_HOST_GRANULARITY and EKV_HOST_BUDGET (bytes) do the same. */
int ekv_host_configure(uint64_t granularity, uint64_t budget_bytes);

/* Routing.  Between begin and end the calling thread's next ekv_malloc on that device makes a reservation; end says
 * which (0: none was made). */
int ekv_route_begin(int device, uint64_t max_chunk_bytes, int shareable);
uint64_t ekv_route_end(void);
/* Which driver serves ekv_malloc: EKV_CUDA (the default) or EKV_HIP. */
int ekv_torch_driver(int driver);

/* What ekv_malloc serves without a route comes from a cache.  For PyTorch's hooks: another stream uses this memory;
 * give unused memory back to the driver. */
void ekv_record_stream(void *address, void *stream);
void ekv_empty_cache(void);
uint64_t ekv_cached_bytes(void);

/* The calling thread's error record: returns its status, copies its text. */
int ekv_last_error(char *text, size_t text_bytes);
