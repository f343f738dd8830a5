/* Compares the declarations in the shim's CUDA driver with cuda.h.  Only compiled (-fsyntax-only), never linked. */
#define __CUDA_API_VERSION_INTERNAL /* declares earlier versions of calls too, which the library still exports */
#include <cuda.h>

#include <stddef.h>

enum {
    REAL_OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY,
    REAL_NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED
};
#define CUDA_ERROR_OUT_OF_MEMORY SHIM_OUT_OF_MEMORY
#define CUDA_ERROR_NOT_SUPPORTED SHIM_NOT_SUPPORTED
#include "../../allocator/csrc/driver_cuda.c"

#define SAME(a, b) _Static_assert((long long)(a) == (long long)(b), #a " is not " #b)
#define AT(type, member, ours, our_member) SAME(offsetof(type, member), offsetof(ours, our_member))

SAME(REAL_OUT_OF_MEMORY, SHIM_OUT_OF_MEMORY);
SAME(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, VMM_SUPPORTED);
SAME(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, GPU_DIRECT_RDMA_WITH_VMM_SUPPORTED);
SAME(CU_STREAM_NON_BLOCKING, STREAM_NON_BLOCKING);
SAME(CU_STREAM_CAPTURE_MODE_RELAXED, CAPTURE_MODE_RELAXED);
SAME(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, TYPE_FD);
SAME(CU_MEM_HANDLE_TYPE_FABRIC, TYPE_FABRIC);
SAME(CU_MEM_ALLOCATION_TYPE_PINNED, 1);
SAME(CU_MEM_LOCATION_TYPE_DEVICE, 1);
SAME(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3);

SAME(sizeof(CUmemAllocationProp), sizeof(allocation_prop));
AT(CUmemAllocationProp, type, allocation_prop, type);
AT(CUmemAllocationProp, requestedHandleTypes, allocation_prop, requested_handle_types);
AT(CUmemAllocationProp, location, allocation_prop, location);
AT(CUmemAllocationProp, win32HandleMetaData, allocation_prop, win32_handle_meta_data);
AT(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable, allocation_prop, alloc_flags.gpu_direct_rdma_capable);
AT(CUmemAllocationProp, allocFlags.usage, allocation_prop, alloc_flags.usage);
SAME(sizeof(CUmemLocation), sizeof(location));
AT(CUmemLocation, id, location, id);
SAME(sizeof(CUmemAccessDesc), sizeof(access_desc));
AT(CUmemAccessDesc, flags, access_desc, flags);
SAME(sizeof(CUmemGenericAllocationHandle), sizeof(ekv_handle));
SAME(sizeof(CUdeviceptr), sizeof(uint64_t));

/* Every symbol that the shim asks the library for is one that the header declares, by its exported name. */
#define DECLARED(symbol, member, parameters) _Static_assert(sizeof(&symbol) == sizeof(void *), #symbol);
SYMBOLS(DECLARED)
