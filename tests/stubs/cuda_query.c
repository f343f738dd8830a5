/* The CUDA stub's questions about addresses and errors. */
#include "cuda_stub.h"

/* Questions about an address. */
static int address_range(device_pointer *base, size_t *size, device_pointer address)
{
    const sim_mapping *mapping = sim_find_mapping(address);
    const sim_range *range = sim_find_range(address);
    if (!mapping && !(range && range->is_allocation))
        return SIM_INVALID_VALUE;
    if (base)
        *base = mapping ? mapping->address : range->address;
    if (size)
        *size = mapping ? mapping->size : range->size;
    return SIM_OK;
}
SIM_EXPORT int cuMemGetAddressRange_v2(device_pointer *base, size_t *size, device_pointer address)
{
    CALL(DEVICE, address_range(base, size, address));
}

static int pointer_attribute(void *data, int attribute, device_pointer address)
{
    const sim_mapping *mapping = sim_find_mapping(address);
    const sim_range *range = sim_find_range(address);
    if (!data || !range)
        return SIM_INVALID_VALUE;
    switch (attribute) {
    case 2: /* memory type: device */
        *(unsigned *)data = 2;
        return SIM_OK;
    case 9: /* device ordinal */
        *(int *)data = mapping ? mapping->handle->device : range->device;
        return SIM_OK;
    case 11: /* start of the range */
        *(device_pointer *)data = range->address;
        return SIM_OK;
    case 12: /* its size */
        *(size_t *)data = range->size;
        return SIM_OK;
    case 13: /* mapped */
        *(unsigned char *)data = mapping || range->is_allocation;
        return SIM_OK;
    case 14: /* allowed handle types */
        *(uint64_t *)data = mapping ? mapping->handle->handle_types : 0;
        return SIM_OK;
    case 15: /* GPUDirect RDMA capable */
        *(unsigned char *)data = mapping ? mapping->handle->rdma : 1;
        return SIM_OK;
    case 18: /* size of the mapping */
        *(size_t *)data = mapping ? mapping->size : range->size;
        return SIM_OK;
    case 19: /* its start */
        *(device_pointer *)data = mapping ? mapping->address : range->address;
        return SIM_OK;
    default:
        return SIM_INVALID_VALUE;
    }
}
SIM_EXPORT int cuPointerGetAttribute(void *data, int attribute, device_pointer address)
{
    CALL(SIM_NEEDS_INIT, pointer_attribute(data, attribute, address));
}

/* Errors: no state, no lock, and callable at any time. */
static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing stream"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int describe(int code, const char **out, bool name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *out = name ? errors[i].name : errors[i].text;
            return SIM_OK;
        }
    *out = NULL;
    return SIM_INVALID_VALUE;
}
SIM_EXPORT int cuGetErrorName(int code, const char **name) { return describe(code, name, true); }
SIM_EXPORT int cuGetErrorString(int code, const char **text) { return describe(code, text, false); }
