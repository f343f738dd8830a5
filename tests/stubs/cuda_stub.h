/* What the files of the CUDA stub share. */
#ifndef CUDA_STUB_H
#define CUDA_STUB_H

#include "vmm_sim.h"

typedef uint64_t device_pointer;

#define DEVICE (SIM_NEEDS_INIT | SIM_NEEDS_CONTEXT)
#define MEMORY (DEVICE | SIM_UNSAFE_IN_CAPTURE)
#define CALL(needs, action)                                                                                            \
    do {                                                                                                               \
        int code_ = sim_enter(__func__, needs);                                                                        \
        if (!code_)                                                                                                    \
            code_ = (action);                                                                                          \
        return sim_leave(code_);                                                                                       \
    } while (0)

#endif
