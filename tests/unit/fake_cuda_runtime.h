/* SPDX-License-Identifier: Apache-2.0 */
/* Stands for the runtime of CUDA under client/cuda/stream.c: two devices that have memory of the
 * host. It runs no kernel. */
#ifndef MOE_TESTS_FAKE_CUDA_RUNTIME_H
#define MOE_TESTS_FAKE_CUDA_RUNTIME_H

#include <stdatomic.h>

extern struct fake_cuda {
    int device_of_memory;      /* what it says of each address */
    _Atomic int registered;    /* 1: memory of the host is */
    _Atomic int registrations; /* calls of cudaHostRegister, also those that fail */
} fake_cuda;

#endif
