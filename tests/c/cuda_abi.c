/* Compares the stub's declarations with cuda.h: layouts, values, and the names that the library exports (cuda.h maps each
 * function to its current version by a macro of the same name).  For the shim: cuda_abi_shim.c. */
#include <cuda.h>

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "../stubs/cuda_types.h"

#define SAME(a, b) _Static_assert((long long)(a) == (long long)(b), #a " is not " #b)
#define AT(type, member, ours, our_member) SAME(offsetof(type, member), offsetof(ours, our_member))

SAME(sizeof(CUmemLocation), sizeof(stub_location));
SAME(sizeof(CUmemAllocationProp), sizeof(stub_prop));
AT(CUmemAllocationProp, type, stub_prop, type);
AT(CUmemAllocationProp, requestedHandleTypes, stub_prop, handle_types);
AT(CUmemAllocationProp, win32HandleMetaData, stub_prop, win32);
AT(CUmemAllocationProp, allocFlags.compressionType, stub_prop, compression);
AT(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable, stub_prop, rdma);
AT(CUmemAllocationProp, allocFlags.usage, stub_prop, usage);
SAME(sizeof(CUmemAccessDesc), sizeof(stub_access));
AT(CUmemAccessDesc, flags, stub_access, flags);
SAME(sizeof(CUmemGenericAllocationHandle), 8);
SAME(sizeof(CUdeviceptr), 8);
SAME(sizeof(CUdevice), sizeof(int));
SAME(sizeof(CUmemFabricHandle), 64);

SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, STUB_ATTRIBUTE_MAJOR);
SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, STUB_ATTRIBUTE_MINOR);
SAME(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, STUB_ATTRIBUTE_VMM);
SAME(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, STUB_ATTRIBUTE_FD);
SAME(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, STUB_ATTRIBUTE_RDMA_VMM);
SAME(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, STUB_ATTRIBUTE_RDMA);
SAME(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, STUB_ATTRIBUTE_FABRIC);

/* What is written as plain numbers. */
SAME(CU_MEM_ALLOCATION_TYPE_PINNED, 1);
SAME(CU_MEM_LOCATION_TYPE_DEVICE, 1);
SAME(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1);
SAME(CU_MEM_HANDLE_TYPE_FABRIC, 8);
SAME(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3);
SAME(CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0);
SAME(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, 1);
SAME(CU_STREAM_NON_BLOCKING, 1);
SAME(CU_STREAM_CAPTURE_MODE_RELAXED, 2);
SAME(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2);
SAME(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9);
SAME(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11);
SAME(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12);
SAME(CU_POINTER_ATTRIBUTE_MAPPED, 13);
SAME(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, 14);
SAME(CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, 15);
SAME(CU_POINTER_ATTRIBUTE_MAPPING_SIZE, 18);
SAME(CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, 19);
SAME(CUDA_ERROR_INVALID_VALUE, 1);
SAME(CUDA_ERROR_OUT_OF_MEMORY, 2);
SAME(CUDA_ERROR_NOT_INITIALIZED, 3);
SAME(CUDA_ERROR_INVALID_DEVICE, 101);
SAME(CUDA_ERROR_INVALID_CONTEXT, 201);
SAME(CUDA_ERROR_INVALID_HANDLE, 400);
SAME(CUDA_ERROR_ILLEGAL_ADDRESS, 700);
SAME(CUDA_ERROR_NOT_PERMITTED, 800);
SAME(CUDA_ERROR_NOT_SUPPORTED, 801);
SAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900);
SAME(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906);

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

/* Without per-thread default streams, each name must expand to the symbol that the shim asks for. */
static const char *const names[][2] = {
    {TEXT(cuCtxPushCurrent), "cuCtxPushCurrent_v2"},
    {TEXT(cuCtxPopCurrent), "cuCtxPopCurrent_v2"},
    {TEXT(cuDevicePrimaryCtxRelease), "cuDevicePrimaryCtxRelease_v2"},
    {TEXT(cuStreamDestroy), "cuStreamDestroy_v2"},
    {TEXT(cuStreamSynchronize), "cuStreamSynchronize"},
    {TEXT(cuMemAlloc), "cuMemAlloc_v2"},
    {TEXT(cuMemFree), "cuMemFree_v2"},
    {TEXT(cuMemGetInfo), "cuMemGetInfo_v2"},
    {TEXT(cuMemGetAddressRange), "cuMemGetAddressRange_v2"},
    {TEXT(cuMemsetD8), "cuMemsetD8_v2"},
    {TEXT(cuMemsetD8Async), "cuMemsetD8Async"},
    {TEXT(cuMemcpyDtoD), "cuMemcpyDtoD_v2"},
    {TEXT(cuMemcpyDtoDAsync), "cuMemcpyDtoDAsync_v2"},
    {TEXT(cuMemcpyDtoH), "cuMemcpyDtoH_v2"},
    {TEXT(cuMemcpyHtoD), "cuMemcpyHtoD_v2"},
    {TEXT(cuMemAddressReserve), "cuMemAddressReserve"},
    {TEXT(cuMemCreate), "cuMemCreate"},
    {TEXT(cuMemMap), "cuMemMap"},
    {TEXT(cuMemSetAccess), "cuMemSetAccess"},
    {TEXT(cuMemRetainAllocationHandle), "cuMemRetainAllocationHandle"},
};

/* The parameters as the shim passes them, against the header's prototypes. */
#define TAKES(name, ...) _Static_assert(__builtin_types_compatible_p(__typeof__(&name), CUresult (*)(__VA_ARGS__)), #name)
TAKES(cuMemAddressReserve, CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
TAKES(cuMemAddressFree, CUdeviceptr, size_t);
TAKES(cuMemCreate, CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
TAKES(cuMemRelease, CUmemGenericAllocationHandle);
TAKES(cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
TAKES(cuMemUnmap, CUdeviceptr, size_t);
TAKES(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
TAKES(cuMemsetD8Async, CUdeviceptr, unsigned char, size_t, CUstream);
TAKES(cuMemGetAllocationGranularity, size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
TAKES(cuMemExportToShareableHandle, void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
      unsigned long long);
TAKES(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
TAKES(cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *);

int main(void)
{
    int wrong = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i][0], names[i][1])) {
            fprintf(stderr, "cuda.h says %s, we say %s\n", names[i][0], names[i][1]);
            wrong = 1;
        }
    return wrong;
}
