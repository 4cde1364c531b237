/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as grpc-status-details-bin in a client. Decoded values are within their bounds, and
 * encoding then decoding gives the same values. */
#include "driver.h"
#include "rpc/core.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct moe_status got = {.code = MOE_UNAVAILABLE}, again = {.code = MOE_UNAVAILABLE};
    uint8_t bytes[MOE_RPC_DETAILS_BYTES];
    moe_rpc_details_get(data, size, &got);
    MOE_INVARIANT(got.reason < MOE_REASON_COUNT);
    MOE_INVARIANT(got.retry_after_ms < 86400u * 1000);
    MOE_INVARIANT(got.code == MOE_UNAVAILABLE && got.text[0] == '\0');
    size_t length = moe_rpc_details_put(&got, bytes);
    moe_rpc_details_get(bytes, length, &again);
    MOE_INVARIANT(again.reason == got.reason && again.retry_after_ms == got.retry_after_ms);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static uint8_t bytes[MOE_RPC_DETAILS_BYTES];
    if (i >= MOE_REASON_COUNT)
        return 0;
    struct moe_status st =
        moe_error_retry(MOE_UNAVAILABLE, (enum moe_reason)i, (uint32_t)i * 977, "sentence %zu", i);
    *data = bytes;
    return moe_rpc_details_put(&st, bytes);
}
