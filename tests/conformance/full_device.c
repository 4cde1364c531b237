/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU that says it has no memory left, without taking it: quick, and possible under a tool that
 * needs memory of its own. The program that links this wraps cudaMemGetInfo (see CMakeLists.txt),
 * which the backend asks before it takes memory. */
#include "seat.h"

#include <cuda_runtime_api.h>

cudaError_t __real_cudaMemGetInfo(size_t *free_bytes, size_t *total);
cudaError_t __wrap_cudaMemGetInfo(size_t *free_bytes, size_t *total);

cudaError_t __wrap_cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    cudaError_t rc = __real_cudaMemGetInfo(free_bytes, total);
    if (device_is_full)
        *free_bytes = 0;
    return rc;
}
