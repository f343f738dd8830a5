/* What the C files share: the driver table, devices, the error record and the lock. */
#ifndef EKV_INTERNAL_H
#define EKV_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ekv.h"

typedef uint64_t ekv_handle;

struct ekv_driver;

/* What finding out about a device takes for a moment.  What the driver refuses to take back stays here, and is given
 * back before the next time. */
typedef struct ekv_trial {
    uint64_t address, size;
    ekv_handle handle;
    bool reserved, created, mapped;
} ekv_trial;

/* One device of one driver, opened once per process. */
typedef struct ekv_device {
    const struct ekv_driver *driver;
    int ordinal;
    void *context; /* cuda: the retained primary context */
    void *stream;  /* cuda, hip: a non-blocking stream for zeroing */
    ekv_trial trial;
    struct ekv_device *next;
} ekv_device;

/* A driver, in life-cycle order.  Every function returns the driver's own code, 0 for success, and has recorded the
 * failure with ekv_fail.  Addresses and sizes are multiples of the granularity, except for zero, allocate and free. */
typedef struct ekv_driver {
    const char *name;
    int kind;
    int out_of_memory_code;
    bool fresh_memory_is_zero;
    int (*open)(ekv_device *device);
    int (*granularity)(ekv_device *device, int handle_kind, bool recommended, uint64_t *granularity);
    int (*reserve)(ekv_device *device, uint64_t size, uint64_t alignment, uint64_t *address);
    int (*create)(ekv_device *device, int handle_kind, uint64_t size, ekv_handle *handle);
    int (*map)(ekv_device *device, uint64_t address, uint64_t size, ekv_handle handle);
    int (*set_access)(ekv_device *device, uint64_t address, uint64_t size);
    int (*unmap)(ekv_device *device, uint64_t address, uint64_t size);
    int (*release)(ekv_device *device, ekv_handle handle, uint64_t size);
    int (*unreserve)(ekv_device *device, uint64_t address, uint64_t size);
    int (*zero)(ekv_device *device, uint64_t address, uint64_t size); /* enqueued: finished after zero_wait */
    int (*zero_wait)(ekv_device *device);
    int (*stream_wait)(ekv_device *device, void *stream);
    int (*capture_id)(ekv_device *device, void *stream, uint64_t *id); /* 0: the stream is not being captured */
    int (*synchronize)(ekv_device *device); /* all work of the device that may still use its memory */
    int (*memory_info)(ekv_device *device, uint64_t *free_bytes, uint64_t *total_bytes);
    int (*gpu_direct_rdma)(ekv_device *device, bool *capable);
    int (*export_file)(ekv_device *device, ekv_handle handle, int *file); /* the caller closes file */
    int (*import_file)(ekv_device *device, int file, uint64_t size, ekv_handle *handle); /* and keeps it here */
    int (*allocate)(ekv_device *device, uint64_t size, uint64_t *address); /* plain memory, for ekv_malloc */
    int (*free)(ekv_device *device, uint64_t address);
    const char *(*error_name)(int code);
} ekv_driver;

extern const ekv_driver ekv_host_driver, ekv_cuda_driver, ekv_hip_driver;

/* registry.c: the lock, fork detection, devices. */
int ekv_enter(void); /* clears the error record, checks for a fork, takes the lock */
void ekv_leave(void);
int ekv_device_get(int driver, int ordinal, ekv_device **device); /* with the lock held */

/* probe.c: gives back what a trial holds; the driver's first failure is recorded and returned. */
int ekv_trial_end(ekv_device *device);

/* error.c: the calling thread's record.  The first failure sets status and text, later ones are appended as failed
 * undo steps. */
void ekv_error_clear(void);
/* While on, failures are recorded where nobody reads them: for what destructors call, which garbage collection may run
 * between a failed call and the reading of its record. */
void ekv_error_aside(bool on);
int ekv_error_status(void);
int ekv_error(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Records a driver failure and returns its code; address 0 and size 0 are left out of the text. */
int ekv_fail(const ekv_device *device, const char *call, int code, uint64_t address, uint64_t size);
/* Forgets failures recorded since the mark: for attempts that may fail. */
typedef struct ekv_error_mark {
    int status;
    size_t length;
} ekv_error_mark;
ekv_error_mark ekv_error_get_mark(void);
void ekv_error_rewind(ekv_error_mark mark, char *text, size_t text_bytes);

/* reservation.c, for torch_malloc.c, with the lock held. */
int ekv_reserve_locked(ekv_device *device, uint64_t size, uint64_t max_chunk, int shareable, uint64_t *id,
                       uint64_t *base);
/* Frees the reservation that starts at base: 1 when there is one.  What fails, or would have to wait for the device while
 * stream is being captured, is finished at a later call. */
int ekv_unreserve_at_locked(uint64_t base, void *stream);
void ekv_retry_locked(void);
uint64_t ekv_reserved_bytes_locked(int driver, int device);
int ekv_pick_handle_kind(ekv_device *device, int *kind, uint64_t *granularity, char *reason, size_t reason_bytes);

#endif
