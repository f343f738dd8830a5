/* The stub's own idea of hip_runtime_api.h, as ROCm has had it since 5.5: layouts and values written down here,
 * independent of the shim's.  Facts from ROCm/rocm-systems projects/hip/include/hip/hip_runtime_api.h (hipMemLocation,
 * hipMemAllocationProp, hipMemAccessDesc, hipDeviceAttribute_t) and projects/clr/hipamd/src/hip_vm.cpp (behaviour).
 * ROCm 5.2's hipMemAllocationProp had another order of fields; nobody serves with that release. */
#ifndef STUB_HIP_TYPES_H
#define STUB_HIP_TYPES_H

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
} stub_prop;

typedef struct stub_access {
    stub_location location;
    int flags;
} stub_access;

enum { STUB_ATTRIBUTE_VMM = 89 /* hipDeviceAttributeVirtualMemoryManagementSupported */ };

_Static_assert(sizeof(stub_location) == 8, "hipMemLocation");
_Static_assert(sizeof(stub_prop) == 32, "hipMemAllocationProp");
_Static_assert(offsetof(stub_prop, location) == 8 && offsetof(stub_prop, win32) == 16, "hipMemAllocationProp");
_Static_assert(offsetof(stub_prop, rdma) == 25 && offsetof(stub_prop, usage) == 26, "allocFlags");
_Static_assert(sizeof(stub_access) == 12 && offsetof(stub_access, flags) == 8, "hipMemAccessDesc");

#endif
