/* SPDX-License-Identifier: Apache-2.0 */
#include "store/records.h"

#include <string.h>

enum { KIND_STATE = 1 };

static const uint8_t magic[8] = "moedlog\n";

/* CRC-32C (Castagnoli), reflected polynomial 0x82f63b78; bit by bit, because records are small. */
static uint32_t checksum(const uint8_t *data, size_t length)
{
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < length; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (UINT32_C(0x82f63b78) & (0 - (crc & 1)));
    }
    return ~crc;
}

static void put(uint8_t *to, uint32_t value)
{
    for (size_t i = 0; i < 4; i++)
        to[i] = (uint8_t)(value >> (8 * i));
}

static uint32_t get(const uint8_t *from)
{
    uint32_t value = 0;
    for (size_t i = 0; i < 4; i++)
        value |= (uint32_t)from[i] << (8 * i);
    return value;
}

void moe_records_put_header(uint8_t to[MOE_RECORDS_HEADER_BYTES], uint32_t format)
{
    memcpy(to, magic, sizeof magic);
    put(to + 8, format);
    put(to + 12, checksum(to, 12));
}

void moe_records_put_head(uint8_t to[MOE_RECORDS_HEAD_BYTES], const uint8_t *payload, size_t length)
{
    put(to, (uint32_t)length);
    put(to + 4, KIND_STATE);
    put(to + 8, checksum(payload, length));
    put(to + 12, checksum(to, 12));
}

static struct moe_status damaged(const char *what)
{
    return moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "damaged: %s", what);
}

/* Length of the intact record at `at`; 0 when there is none. */
static size_t whole_record(const uint8_t *at, size_t left)
{
    if (left < MOE_RECORDS_HEAD_BYTES)
        return 0;
    size_t length = get(at);
    if (checksum(at, 12) != get(at + 12) || length > left - MOE_RECORDS_HEAD_BYTES ||
        checksum(at + MOE_RECORDS_HEAD_BYTES, length) != get(at + 8))
        return 0;
    return MOE_RECORDS_HEAD_BYTES + length;
}

static struct moe_status check_header(const uint8_t *image, size_t length, uint32_t newest)
{
    if (length < MOE_RECORDS_HEADER_BYTES || memcmp(image, magic, sizeof magic) != 0)
        return damaged("not a group log");
    uint32_t version = get(image + 8);
    if (get(image + 12) != checksum(image, 12))
        return damaged("header checksum");
    if (version == 0 || version > newest)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "has format %u; this release reads up to %u", version, newest);
    return moe_ok();
}

/* The last `left` bytes of the image are no intact record. An intact record inside them means
 * damage in the middle: what was announced is then unknown. Otherwise an append was cut short. That
 * record may have been acknowledged (a bit may also flip in the last record). */
static struct moe_status count_lost(const uint8_t *at, size_t left, size_t record_least,
                                    size_t *lost)
{
    for (size_t skip = 1; skip < left; skip++)
        if (whole_record(at + skip, left - skip) > 0)
            return damaged("a damaged record before good ones");
    *lost = 1 + left / (MOE_RECORDS_HEAD_BYTES + record_least);
    return moe_ok();
}

struct moe_status moe_records_read(const uint8_t *image, size_t length,
                                   const struct moe_store_format *format,
                                   struct moe_records_last *last)
{
    MOE_TRY(check_header(image, length, format->version));
    const uint8_t *at = image + MOE_RECORDS_HEADER_BYTES, *end = image + length;
    size_t bytes;
    *last = (struct moe_records_last){.format = get(image + 8)};
    for (; at < end; at += bytes) {
        bytes = whole_record(at, (size_t)(end - at));
        if (bytes == 0)
            break;
        if (get(at + 4) != KIND_STATE)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                             "holds a record that only a newer release knows");
        last->payload = at + MOE_RECORDS_HEAD_BYTES;
        last->length = bytes - MOE_RECORDS_HEAD_BYTES;
    }
    if (last->payload == NULL) /* a new log gets one record before it gets its name */
        return damaged("no record");
    return at < end ? count_lost(at, (size_t)(end - at), format->record_least, &last->lost)
                    : moe_ok();
}
