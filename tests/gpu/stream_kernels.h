/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of stream_client.c: the next input of a request, and the check of its output. Both choose
 * by a counter on the device, so that a captured graph has other inputs at each launch. */
#ifndef MOE_TEST_STREAM_KERNELS_H
#define MOE_TEST_STREAM_KERNELS_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In device memory. */
struct stream_counts {
    uint32_t turn;        /* of the input; the check goes to the next one */
    uint32_t wrong_bytes; /* of all outputs */
    uint32_t wrong_turns; /* outputs with a wrong byte */
};

/* Copies inputs[turn % patterns] to x; each has `bytes`, a multiple of 4. */
cudaError_t stream_next_input(const struct stream_counts *counts, const void *inputs,
                              uint32_t patterns, void *x, size_t bytes, cudaStream_t stream);
/* Compares y with outputs[turn % patterns], all bits; then counts a turn. */
cudaError_t stream_check_output(struct stream_counts *counts, const void *outputs,
                                uint32_t patterns, const void *y, size_t bytes,
                                cudaStream_t stream);

/* Stores the device's clock in ns. */
cudaError_t stream_stamp(uint64_t *at, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
