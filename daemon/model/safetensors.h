/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors file format: a strict reader, and a writer.
 *
 * Layout: u64 little-endian N, N bytes of JSON header, then tensor bytes; offsets in the header
 * count from the end of the header. Files are read with pread: a mapped file that is truncated
 * would end the process by a signal. */
#ifndef MOE_MODEL_SAFETENSORS_H
#define MOE_MODEL_SAFETENSORS_H

#include "base/status.h"
#include "moe/weight_source.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOE_TENSOR_RANK_MAX = 8 };

/* All number formats of the file format; only some are supported for computing. */
enum moe_st_dtype {
    MOE_ST_BOOL,
    MOE_ST_F4,
    MOE_ST_F6_E2M3,
    MOE_ST_F6_E3M2,
    MOE_ST_U8,
    MOE_ST_I8,
    MOE_ST_F8_E5M2,
    MOE_ST_F8_E4M3,
    MOE_ST_F8_E8M0,
    MOE_ST_F8_E4M3FNUZ,
    MOE_ST_F8_E5M2FNUZ,
    MOE_ST_I16,
    MOE_ST_U16,
    MOE_ST_F16,
    MOE_ST_BF16,
    MOE_ST_I32,
    MOE_ST_U32,
    MOE_ST_F32,
    MOE_ST_C64,
    MOE_ST_F64,
    MOE_ST_I64,
    MOE_ST_U64,
    MOE_ST_DTYPE_COUNT
};
const char *moe_st_dtype_name(enum moe_st_dtype d); /* "BF16"; "?" outside the enum */
uint32_t moe_st_dtype_bits(enum moe_st_dtype d);    /* of one element; 0 outside the enum */
/* Bytes of a tensor; false when the number overflows or has a fraction. */
bool moe_st_tensor_bytes(enum moe_st_dtype d, uint32_t rank, const uint64_t *shape,
                         uint64_t *bytes);

struct moe_tensor {
    const char *name; /* owned by the file */
    enum moe_st_dtype dtype;
    uint32_t rank;
    uint64_t shape[MOE_TENSOR_RANK_MAX];
    uint64_t offset; /* first byte, from the start of the file */
    uint64_t bytes;
};

/* N, the length of the header, is at most this: a limit of the format itself. */
#define MOE_ST_HEADER_MAX UINT64_C(100000000)

/* Maximum tensors of a file. Bounds the memory for a header: about 200 bytes and the name for each
 * tensor, instead of a tree of 100 MB of JSON. */
enum { MOE_ST_TENSORS_MAX = 1 << 19 };

struct moe_st_file;

/* Opens and checks the header in full. Errors: MOE_INVALID_ARGUMENT with MALFORMED, TRUNCATED,
 * TOO_LARGE or TENSOR_INVALID; MOE_NOT_FOUND/IO. */
struct moe_status moe_st_open(const char *path, struct moe_st_file **out) MOE_CHECKED;
/* The same for one name inside an open directory; links and names with '/' are refused. */
struct moe_status moe_st_open_at(int directory, const char *name,
                                 struct moe_st_file **out) MOE_CHECKED;
void moe_st_close(struct moe_st_file *f);

size_t moe_st_count(const struct moe_st_file *f);
const struct moe_tensor *moe_st_tensor(const struct moe_st_file *f, size_t i);       /* by offset */
const struct moe_tensor *moe_st_find(const struct moe_st_file *f, const char *name); /* or NULL */

/* Reads bytes [first, first + length) of tensor `t`, counted from its start. */
struct moe_status moe_st_read(const struct moe_st_file *f, const struct moe_tensor *t,
                              uint64_t first, uint64_t length, void *to) MOE_CHECKED;
/* A source of tensor `t` from byte `first` on, valid while `f` is open. Reads may continue into the
 * next tensor: the source does not check. */
struct moe_weight_source moe_st_weight_source(const struct moe_st_file *f,
                                              const struct moe_tensor *t, uint64_t first);

/* One tensor to write; bytes are taken from `data`. */
struct moe_st_out {
    const char *name;
    enum moe_st_dtype dtype;
    uint32_t rank;
    uint64_t shape[MOE_TENSOR_RANK_MAX];
    const void *data;
};

/* Writes a file through a temporary one in the same directory: fsync, rename, fsync of the
 * directory. Readers see the old file or the new one. The header is padded so that data starts at a
 * multiple of 8; tensors are sorted by descending element size, then name. `metadata` is
 * key, value, key, value, ..., NULL; or NULL. */
struct moe_status moe_st_write(const char *path, const struct moe_st_out *tensors, size_t count,
                               const char *const *metadata) MOE_CHECKED;

/* Copies the bytes of tensor `i`, in the caller's order, to `to`. */
typedef struct moe_status (*moe_st_source)(void *ctx, size_t i, void *to, uint64_t bytes);

/* Writes a new file `name` in `directory`, synced to disk, without holding more than its largest
 * tensor in memory: `data` of the tensors is not looked at. `*bytes` and `sha256` (65 characters,
 * the last a zero; or NULL) are the file's. A file that could not be finished is removed. Does
 * not sync the directory: use it only for directories without readers. Errors: those of
 * moe_st_write and of `source`; MOE_ALREADY_EXISTS/IO; MOE_RESOURCE_EXHAUSTED/IO (disk full). */
struct moe_status moe_st_write_at(int directory, const char *name, const struct moe_st_out *tensors,
                                  size_t count, const char *const *metadata, moe_st_source source,
                                  void *ctx, uint64_t *bytes, char *sha256) MOE_CHECKED;

/* The open file and its length, for copies. */
int moe_st_descriptor(const struct moe_st_file *f);
uint64_t moe_st_file_bytes(const struct moe_st_file *f);

#endif
