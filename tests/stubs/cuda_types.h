/* The stub's own idea of cuda.h (CUDA 13.0): layouts and values written down here, independent of the shim's, and
 * compared with the header by tests/c/cuda_abi.c. */
#ifndef STUB_CUDA_TYPES_H
#define STUB_CUDA_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef struct stub_location {
    int type, id;
} stub_location;

typedef struct stub_prop {
    int type, handle_types;
    stub_location location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} stub_prop;

typedef struct stub_access {
    stub_location location;
    int flags;
} stub_access;

enum {
    STUB_ATTRIBUTE_MAJOR = 75,
    STUB_ATTRIBUTE_MINOR = 76,
    STUB_ATTRIBUTE_VMM = 102,
    STUB_ATTRIBUTE_FD = 103,
    STUB_ATTRIBUTE_RDMA_VMM = 110,
    STUB_ATTRIBUTE_RDMA = 116,
    STUB_ATTRIBUTE_FABRIC = 128
};

_Static_assert(sizeof(stub_location) == 8, "CUmemLocation");
_Static_assert(sizeof(stub_prop) == 32, "CUmemAllocationProp");
_Static_assert(offsetof(stub_prop, handle_types) == 4, "requestedHandleTypes");
_Static_assert(offsetof(stub_prop, location) == 8, "location");
_Static_assert(offsetof(stub_prop, win32) == 16, "win32HandleMetaData");
_Static_assert(offsetof(stub_prop, rdma) == 25, "allocFlags.gpuDirectRDMACapable");
_Static_assert(offsetof(stub_prop, usage) == 26, "allocFlags.usage");
_Static_assert(sizeof(stub_access) == 12 && offsetof(stub_access, flags) == 8, "CUmemAccessDesc");

#endif
