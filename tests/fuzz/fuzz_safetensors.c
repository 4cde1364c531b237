/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as a safetensors file. It is refused, or every promise about its tensors holds and
 * every byte is readable. */
#include "driver.h"
#include "model/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int file_of(const uint8_t *data, size_t size)
{
    static int fd = -1;
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size)
        abort();
    return fd;
}

/* The tensors cover the rest of the file without gaps; each is found by name and is readable. */
static void check(const struct moe_st_file *f, size_t size)
{
    static uint8_t buffer[1 << 20];
    uint64_t next = moe_st_count(f) > 0 ? moe_st_tensor(f, 0)->offset : size;
    for (size_t i = 0; i < moe_st_count(f); i++) {
        const struct moe_tensor *t = moe_st_tensor(f, i);
        MOE_INVARIANT(t->offset == next && t->bytes <= size && t->rank <= MOE_TENSOR_RANK_MAX);
        MOE_INVARIANT(moe_st_find(f, t->name) == t);
        next += t->bytes;
        size_t n = t->bytes < sizeof buffer ? (size_t)t->bytes : sizeof buffer;
        struct moe_status st = moe_st_read(f, t, t->bytes - n, n, buffer);
        MOE_INVARIANT(!moe_failed(&st));
    }
    MOE_INVARIANT(next == size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[32];
    struct moe_st_file *f;
    snprintf(path, sizeof path, "/proc/self/fd/%d", file_of(data, size));
    struct moe_status st = moe_st_open(path, &f);
    if (moe_failed(&st)) {
        MOE_INVARIANT(st.reason != MOE_REASON_NONE && st.text[0] != '\0');
        return 0;
    }
    check(f, size);
    moe_st_close(f);
    return 0;
}

static size_t with_length(uint8_t *out, const char *header, size_t data_bytes)
{
    uint64_t n = strlen(header);
    memcpy(out, &n, 8);
    memcpy(out + 8, header, n);
    memset(out + 8 + n, 0, data_bytes);
    return 8 + n + data_bytes;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static const struct {
        const char *header;
        size_t data_bytes;
    } seeds[] = {
        {"{}      ", 0},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}}", 24},
        {"{\"__metadata__\":{\"format\":\"pt\"},"
         "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[8,16]},"
         "\"e\":{\"dtype\":\"U8\",\"shape\":[0,9],\"data_offsets\":[16,16]},"
         "\"s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},"
         "\"f\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[16,17]}}   ",
         17},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         1},
    };
    static uint8_t file[1024];
    if (i >= sizeof seeds / sizeof seeds[0])
        return 0;
    *data = file;
    return with_length(file, seeds[i].header, seeds[i].data_bytes);
}
