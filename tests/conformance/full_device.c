/* SPDX-License-Identifier: Apache-2.0 */
/* Simulates a GPU without free memory, and allocates nothing. This is fast, and works under tools
 * that need GPU memory. The program that links this wraps cudaMemGetInfo (see CMakeLists.txt); the
 * backend calls it before an allocation. */
#include "session_fixture.h"

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
