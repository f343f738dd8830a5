#ifndef EKV_HOST_MEMORY_H
#define EKV_HOST_MEMORY_H

#include <stdint.h>

/* Bytes that can be taken without swapping or an out-of-memory kill, and bytes in all; the smallest limit of the
 * process's control groups counts.  UINT64_MAX where nothing can be read. */
void ekv_machine_memory(uint64_t *free_bytes, uint64_t *total_bytes);

#endif
