/* Weights through pinned staging; see weights.h. */
#include "cuda/weights.h"

static struct moe_status put_chunks(struct moe_device *device, const struct moe_cuda_weight *w,
                                    const char *data)
{
    size_t each = moe_dtype_bytes(w->from), total = w->rows * w->columns;
    size_t most = MOE_CUDA_STAGING_BYTES / each;
    for (size_t first = 0; first < total; first += most) {
        size_t n = total - first < most ? total - first : most;
        uint32_t half = device->next_half;
        device->next_half ^= 1;
        MOE_TRY(MOE_CUDA(cudaEventSynchronize(device->staged[half])));
        memcpy(device->staging[half], data + first * each, n * each);
        MOE_TRY(MOE_CUDA(cudaMemcpyAsync(device->landing[half], device->staging[half], n * each,
                                         cudaMemcpyHostToDevice, device->upload)));
        MOE_TRY(moe_cuda_weights_place(w, device->landing[half], first, n, device->upload));
        MOE_TRY(MOE_CUDA(cudaEventRecord(device->staged[half], device->upload)));
    }
    return moe_ok();
}

struct moe_status moe_cuda_weights_put(struct moe_device *device, const struct moe_cuda_weight *w,
                                       const void *data)
{
    MOE_TRY(moe_cuda_device_use(device));
    pthread_mutex_lock(&device->staging_lock);
    struct moe_status st = put_chunks(device, w, data);
    pthread_mutex_unlock(&device->staging_lock);
    return st;
}

struct moe_status moe_cuda_weights_finish(struct moe_device *device)
{
    MOE_TRY(moe_cuda_device_use(device));
    return MOE_CUDA(cudaStreamSynchronize(device->upload));
}
