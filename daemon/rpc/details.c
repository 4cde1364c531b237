/* SPDX-License-Identifier: Apache-2.0 */
/* Statuses on the wire: `grpc-status-details-bin`, the rich error model of the public
 * google/rpc/status.proto and error_details.proto. Supported: ErrorInfo and RetryInfo. */
#include "daemon/endpoint.h"
#include "rpc/core.h"
#include "rpc/wire.h"

#include <string.h>

const char moe_rpc_details_key[] = "grpc-status-details-bin";

static const char info_url[] = "type.googleapis.com/google.rpc.ErrorInfo";
static const char retry_url[] = "type.googleapis.com/google.rpc.RetryInfo";
static const char domain[] = "moe";

/* Field numbers of google.rpc.Status, google.protobuf.Any, ErrorInfo, RetryInfo and Duration. */
enum {
    STATUS_CODE = 1,
    STATUS_MESSAGE = 2,
    STATUS_DETAILS = 3,
    ANY_URL = 1,
    ANY_VALUE = 2,
    INFO_REASON = 1,
    INFO_DOMAIN = 2,
    INFO_METADATA = 3, /* a map entry: key 1, value 2 */
    RETRY_DELAY = 1,
    DURATION_SECONDS = 1,
    DURATION_NANOS = 2,
};

enum { SMALL = 128 };

static void put_text(struct moe_wire_writer *w, uint32_t field, const char *text)
{
    moe_wire_put_bytes(w, field, text, strlen(text));
}

static void put_message(struct moe_wire_writer *w, uint32_t field,
                        const struct moe_wire_writer *message)
{
    moe_wire_put_bytes(w, field, message->memory, message->length);
}

static void put_detail(struct moe_wire_writer *status, const char *url,
                       const struct moe_wire_writer *value)
{
    uint8_t memory[3 * SMALL];
    struct moe_wire_writer any = {.memory = memory, .capacity = sizeof memory};
    put_text(&any, ANY_URL, url);
    put_message(&any, ANY_VALUE, value);
    MOE_INVARIANT(!any.overflow);
    put_message(status, STATUS_DETAILS, &any);
}

/* Metadata `key`: the last word of the text, an address. */
static void put_address(struct moe_wire_writer *info, const char *key, const char *text)
{
    const char *space = strrchr(text, ' '), *address = space != NULL ? space + 1 : text;
    uint8_t memory[SMALL];
    struct moe_wire_writer entry = {.memory = memory, .capacity = sizeof memory};
    put_text(&entry, 1, key);
    put_text(&entry, 2, address);
    if (!entry.overflow)
        put_message(info, INFO_METADATA, &entry);
}

static void put_info(struct moe_wire_writer *status, const struct moe_status *error)
{
    uint8_t memory[2 * SMALL];
    struct moe_wire_writer info = {.memory = memory, .capacity = sizeof memory};
    put_text(&info, INFO_REASON, moe_reason_name(error->reason));
    put_text(&info, INFO_DOMAIN, domain);
    if (error->reason == MOE_REASON_RECORDED_ELSEWHERE)
        put_address(&info, "worker", error->text);
    if (error->reason == MOE_REASON_NOT_LEADER && moe_endpoint_of_leader(error)[0] != '\0')
        put_address(&info, "leader", error->text);
    put_detail(status, info_url, &info);
}

static void put_retry(struct moe_wire_writer *status, uint32_t milliseconds)
{
    uint8_t delay_memory[SMALL], memory[SMALL];
    struct moe_wire_writer delay = {.memory = delay_memory, .capacity = sizeof delay_memory};
    moe_wire_put_uint(&delay, DURATION_SECONDS, milliseconds / 1000);
    moe_wire_put_uint(&delay, DURATION_NANOS, milliseconds % 1000 * UINT64_C(1000000));
    struct moe_wire_writer retry = {.memory = memory, .capacity = sizeof memory};
    put_message(&retry, RETRY_DELAY, &delay);
    put_detail(status, retry_url, &retry);
}

size_t moe_rpc_details_put(const struct moe_status *error, uint8_t *to)
{
    struct moe_wire_writer status = {.memory = to, .capacity = MOE_RPC_DETAILS_BYTES};
    moe_wire_put_uint(&status, STATUS_CODE, error->code);
    put_text(&status, STATUS_MESSAGE, error->text);
    if (error->reason != MOE_REASON_NONE)
        put_info(&status, error);
    if (error->retry_after_ms > 0)
        put_retry(&status, error->retry_after_ms);
    MOE_INVARIANT(!status.overflow);
    return status.length;
}

static bool is_text(const struct moe_wire_field *f, const char *text)
{
    return f->length == strlen(text) && memcmp(f->bytes, text, f->length) == 0;
}

static void get_info(const struct moe_wire_field *value, struct moe_status *status)
{
    char reason[64] = "";
    bool ours = false;
    struct moe_wire_field f;
    for (size_t at = 0; moe_wire_next(value->bytes, value->length, &at, &f);) {
        if (f.type != MOE_WIRE_BYTES)
            continue;
        if (f.number == INFO_DOMAIN)
            ours = is_text(&f, domain);
        if (f.number == INFO_REASON && f.length < sizeof reason) {
            memcpy(reason, f.bytes, f.length);
            reason[f.length] = '\0';
        }
    }
    if (ours)
        status->reason = moe_reason_from_name(reason);
}

static void get_retry(const struct moe_wire_field *value, struct moe_status *status)
{
    struct moe_wire_field delay, f;
    uint64_t seconds = 0, nanos = 0;
    for (size_t at = 0; moe_wire_next(value->bytes, value->length, &at, &delay);) {
        if (delay.number != RETRY_DELAY || delay.type != MOE_WIRE_BYTES)
            continue;
        for (size_t in = 0; moe_wire_next(delay.bytes, delay.length, &in, &f);) {
            if (f.number == DURATION_SECONDS && f.type == MOE_WIRE_VARINT)
                seconds = f.value;
            if (f.number == DURATION_NANOS && f.type == MOE_WIRE_VARINT)
                nanos = f.value;
        }
    }
    /* Ignores a negative or very long delay. */
    if (seconds < 86400 && nanos < UINT64_C(1000000000))
        status->retry_after_ms = (uint32_t)(seconds * 1000 + nanos / 1000000);
}

static void get_detail(const struct moe_wire_field *any, struct moe_status *status)
{
    struct moe_wire_field f, url = {0}, value = {0};
    for (size_t at = 0; moe_wire_next(any->bytes, any->length, &at, &f);) {
        if (f.number == ANY_URL && f.type == MOE_WIRE_BYTES)
            url = f;
        if (f.number == ANY_VALUE && f.type == MOE_WIRE_BYTES)
            value = f;
    }
    if (is_text(&url, info_url))
        get_info(&value, status);
    else if (is_text(&url, retry_url))
        get_retry(&value, status);
}

void moe_rpc_details_get(const uint8_t *details, size_t length, struct moe_status *status)
{
    struct moe_wire_field f;
    for (size_t at = 0; moe_wire_next(details, length, &at, &f);) {
        if (f.number == STATUS_DETAILS && f.type == MOE_WIRE_BYTES)
            get_detail(&f, status);
    }
}

struct moe_status moe_rpc_status_from_core(grpc_status_code code, grpc_slice text,
                                           const grpc_metadata_array *trailing)
{
    if (code == GRPC_STATUS_OK)
        return moe_ok();
    bool known = (int)code >= MOE_CANCELLED && (int)code <= MOE_UNAUTHENTICATED;
    size_t length = GRPC_SLICE_LENGTH(text);
    struct moe_status status =
        moe_error(known ? (enum moe_code)code : MOE_UNKNOWN, MOE_REASON_NONE, "%.*s",
                  (int)(length < MOE_STATUS_TEXT ? length : MOE_STATUS_TEXT),
                  (const char *)GRPC_SLICE_START_PTR(text));
    for (size_t i = 0; i < trailing->count; i++) {
        const grpc_metadata *m = &trailing->metadata[i];
        if (grpc_slice_str_cmp(m->key, moe_rpc_details_key) == 0)
            moe_rpc_details_get(GRPC_SLICE_START_PTR(m->value), GRPC_SLICE_LENGTH(m->value),
                                &status);
    }
    return status;
}
