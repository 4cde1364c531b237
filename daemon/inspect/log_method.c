/* SPDX-License-Identifier: Apache-2.0 */
#include "inspect/log_method.h"

#include "daemon/log.h"

#include "moe/v1/admin.pb-c.h"

enum { ANSWER_BYTES = 32 };

/* The level that held before goes to `*before`. */
static struct moe_status set(const char *name, enum moe_log_level *before)
{
    enum moe_log_level level;
    if (!moe_log_level_from_name(name, &level))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_VALUE_INVALID,
                         "a log level is error, warn, info or debug");
    *before = moe_log_level();
    moe_log_set_level(level);
    if (level != *before)
        moe_log_info("the log level is %s now, after %s", moe_log_level_name(level),
                     moe_log_level_name(*before));
    return moe_ok();
}

static struct moe_status answer(const struct moe_rpc_msg *m, struct moe_rpc_call *call)
{
    struct moe_rpc_arena arena;
    void *message;
    uint8_t bytes[ANSWER_BYTES];
    enum moe_log_level before = MOE_LOG_INFO;
    MOE_TRY(moe_rpc_msg_unpack(m, &moe__v1__set_log_level_request__descriptor, &arena, &message));
    const Moe__V1__SetLogLevelRequest *request = message;
    MOE_TRY(set(request->level, &before));
    Moe__V1__SetLogLevelResponse response = MOE__V1__SET_LOG_LEVEL_RESPONSE__INIT;
    response.previous = (char *)(uintptr_t)moe_log_level_name(before);
    size_t length = moe__v1__set_log_level_response__get_packed_size(&response);
    MOE_INVARIANT(length <= sizeof bytes);
    moe__v1__set_log_level_response__pack(&response, bytes);
    moe_rpc_reply(call, &(struct moe_rpc_out){.head = bytes, .head_length = length});
    return moe_ok();
}

static void on_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    (void)ctx;
    struct moe_status st = answer(m, call);
    moe_rpc_msg_free(m);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
}

struct moe_rpc_method moe_inspect_log_method(void)
{
    return (struct moe_rpc_method){
        .path = "/moe.v1.AdminService/SetLogLevel", .kind = MOE_RPC_UNARY, .message = on_message};
}
