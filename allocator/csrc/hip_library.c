/* Opening the HIP runtime, and what surrounds each call.
 *
 * HIP has no context stack: every call runs with its device current and the caller's restored.  A failed HIP call
 * stays in the thread's last error, where PyTorch would take it for its own, so it is fetched away. */
#include "hip.h"

#include <dlfcn.h>
#include <stdlib.h>

ekv_hip_library ekv_hip;

int ekv_hip_check(ekv_device *device, const char *call, int code, uint64_t address, uint64_t size)
{
    if (!code)
        return 0;
    ekv_hip.get_last_error();
    return ekv_fail(device, call, code, address, size);
}

int ekv_hip_quietly(int code)
{
    if (code)
        ekv_hip.get_last_error();
    return code;
}

const char *ekv_hip_error_name(int code)
{
    const char *name = ekv_hip.error_name ? ekv_hip.error_name(code) : NULL;
    return name ? name : "unknown error";
}

int ekv_hip_load(void)
{
    const char *path = getenv("EKV_HIP_LIBRARY");
    void *library;
    if (ekv_hip.library)
        return 0;
    library = dlopen(path && *path ? path : "libamdhip64.so", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return ekv_error(EKV_UNSUPPORTED, "hip: %s", dlerror());
#define LOAD(symbol, member, parameters)                                                                             \
    *(void **)&ekv_hip.member = dlsym(library, #symbol);                                                             \
    if (!ekv_hip.member) {                                                                                           \
        dlclose(library);                                                                                            \
        return ekv_error(EKV_UNSUPPORTED, "hip: the runtime library has no %s: it is older than ROCm 5.5", #symbol); \
    }
    SYMBOLS(LOAD)
#undef LOAD
    *(void **)&ekv_hip.error_name = dlsym(library, "hipGetErrorName");
    ekv_hip.library = library;
    return 0;
}

int ekv_hip_enter(ekv_device *device, ekv_hip_scope *s)
{
    int code;
    *s = (ekv_hip_scope){.capture_mode = CAPTURE_MODE_RELAXED};
    code = CALL(device, hipGetDevice, 0, 0, get_device(&s->caller));
    if (!code && s->caller != device->ordinal) {
        code = CALL(device, hipSetDevice, 0, 0, set_device(device->ordinal));
        s->switched = !code;
    }
    if (!code)
        s->exchanged = !ekv_hip_quietly(ekv_hip.exchange_capture_mode(&s->capture_mode));
    return code;
}

/* The caller's state must come back: a refusal is answered by asking once more. */
void ekv_hip_leave(ekv_hip_scope *s)
{
    if (s->exchanged && ekv_hip_quietly(ekv_hip.exchange_capture_mode(&s->capture_mode)))
        ekv_hip_quietly(ekv_hip.exchange_capture_mode(&s->capture_mode));
    if (s->switched && ekv_hip_quietly(ekv_hip.set_device(s->caller)))
        ekv_hip_quietly(ekv_hip.set_device(s->caller));
}

