/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of a log: a header, then records, each with checksums. Pure.
 *
 * All numbers little-endian, checksums CRC-32C.
 *   header   8 bytes "moedlog\n", u32 format version, u32 checksum of the 12 bytes before
 *   record   u32 payload bytes, u32 kind (1), u32 checksum of payload, u32 checksum of the 12
 *            bytes before, payload */
#ifndef MOE_STORE_RECORDS_H
#define MOE_STORE_RECORDS_H

#include "store/store.h"

enum { MOE_RECORDS_HEADER_BYTES = 16, MOE_RECORDS_HEAD_BYTES = 16 };

void moe_records_put_header(uint8_t to[MOE_RECORDS_HEADER_BYTES], uint32_t format);
/* The head of a record with this payload. */
void moe_records_put_head(uint8_t to[MOE_RECORDS_HEAD_BYTES], const uint8_t *payload,
                          size_t length);

struct moe_records_last {
    const uint8_t *payload; /* in the image: of the last intact record */
    size_t length;
    uint32_t format;
    size_t lost; /* as in struct moe_store_found: the image ends with an incomplete record */
};

/* Reads a whole image. An incomplete record at its end is dropped. Errors: MOE_DATA_LOSS/MALFORMED
 * (no log, no record, damage before the end), MOE_FAILED_PRECONDITION/VERSION_MISMATCH (written by
 * a newer release). */
struct moe_status moe_records_read(const uint8_t *image, size_t length,
                                   const struct moe_store_format *format,
                                   struct moe_records_last *last) MOE_CHECKED;

#endif
