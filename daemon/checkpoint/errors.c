/* SPDX-License-Identifier: Apache-2.0 */
/* Errors that all files of this folder use. */
#include "checkpoint/internal.h"

#include <errno.h>
#include <string.h>

struct moe_status moe_ckpt__io(const char *what)
{
    enum moe_code code = errno == ENOSPC || errno == EDQUOT || errno == EFBIG
                             ? MOE_RESOURCE_EXHAUSTED
                             : MOE_FAILED_PRECONDITION;
    return moe_error(code, MOE_REASON_IO, "%s: %s", what, strerror(errno));
}

struct moe_status moe_ckpt__no_memory(void)
{
    return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "no memory for checkpoints");
}

struct moe_status moe_ckpt__damaged(struct moe_status st)
{
    if (moe_failed(&st) && st.code != MOE_RESOURCE_EXHAUSTED && st.code != MOE_UNAVAILABLE &&
        st.code != MOE_CANCELLED) {
        st.code = MOE_DATA_LOSS;
        st.reason = MOE_REASON_MALFORMED;
    }
    return st;
}

struct moe_status moe_ckpt__go_on(const struct moe_checkpoint_context *c)
{
    return c->cancel == NULL || !atomic_load(c->cancel)
               ? moe_ok()
               : moe_error(MOE_CANCELLED, MOE_REASON_ABORTED, "cancelled");
}
