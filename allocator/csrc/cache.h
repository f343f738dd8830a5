/* The cache of memory that no pool takes.  Everything here is used with the lock held. */
#ifndef EKV_CACHE_H
#define EKV_CACHE_H

#include "internal.h"

int ekv_cache_allocate_locked(ekv_device *device, uint64_t size, void *stream, uint64_t *address);
bool ekv_cache_free_locked(uint64_t address); /* false: the address is none of ours */
/* Gives unused memory back, of one device or of all (NULL); not what a captured graph touches. */
void ekv_cache_trim_locked(ekv_device *device);

#endif
