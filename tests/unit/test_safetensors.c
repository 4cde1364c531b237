/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors reader refuses every file that breaks a rule of the format, each with a typed
 * error, and reads back whatever the writer wrote. */
#include "model/json_file.h"
#include "model_fixture.h"
#include "support/random.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Writes length + header + `data_bytes` zeros as "t", and opens it. */
static struct moe_status open_made(struct fixture *f, uint64_t length, const char *header,
                                   size_t header_bytes, size_t data_bytes, struct moe_st_file **out)
{
    size_t total = 8 + header_bytes + data_bytes;
    char *file = calloc(1, total);
    assert_non_null(file);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, header_bytes);
    fixture_write(f, "t", file, total);
    free(file);
    return moe_st_open(fixture_path(f, "t"), out);
}

static struct moe_status open_header(struct fixture *f, const char *header, size_t data_bytes,
                                     struct moe_st_file **out)
{
    return open_made(f, strlen(header), header, strlen(header), data_bytes, out);
}

/* ---- files that must be refused: name, header, bytes behind it, reason ---- */

#define A_0_4 "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}"

#define FAULTS(X)                                                                                  \
    X(a_header_that_does_not_start_with_a_brace, " {" A_0_4 "}", 4, MALFORMED)                     \
    X(a_header_that_is_a_list, "[1,2,3]", 0, MALFORMED)                                            \
    X(a_header_padded_with_tabs, "{" A_0_4 "}\t\t", 4, MALFORMED)                                  \
    X(a_header_padded_with_newlines, "{" A_0_4 "}\n", 4, MALFORMED)                                \
    X(a_header_followed_by_text, "{" A_0_4 "} x", 4, MALFORMED)                                    \
    X(a_header_followed_by_another, "{" A_0_4 "}{}", 4, MALFORMED)                                 \
    X(a_header_cut_short, "{" A_0_4, 4, MALFORMED)                                                 \
    X(an_empty_header, "", 0, MALFORMED)                                                           \
    X(bad_utf8_in_a_name,                                                                          \
      "{\"\xc3\x28\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, MALFORMED)      \
    X(overlong_utf8, "{\"\xc0\x80\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4,  \
      MALFORMED)                                                                                   \
    X(a_zero_in_a_name, "{\"\\u0000\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}",   \
      4, MALFORMED)                                                                                \
    X(a_duplicate_name, "{" A_0_4 "," A_0_4 "}", 4, MALFORMED)                                     \
    X(metadata_twice, "{\"__metadata__\":{},\"__metadata__\":{}," A_0_4 "}", 4, MALFORMED)         \
    X(a_comma_behind_the_last_tensor, "{" A_0_4 ",}", 4, MALFORMED)                                \
    X(a_comma_before_the_first_tensor, "{," A_0_4 "}", 4, MALFORMED)                               \
    X(a_name_without_a_value, "{\"a\"}", 0, MALFORMED)                                             \
    X(an_empty_value, "{\"a\":}", 0, MALFORMED)                                                    \
    X(a_name_that_does_not_end, "{\"a}", 0, MALFORMED)                                             \
    X(a_value_closed_by_another_bracket, "{\"a\":[}", 0, MALFORMED)                                \
    X(two_brackets_of_another_kind,                                                                \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[1},\"data_offsets\":[0,4]]}", 4, MALFORMED)            \
    X(a_duplicate_field,                                                                           \
      "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,     \
      MALFORMED)                                                                                   \
    X(metadata_that_is_not_an_object, "{\"__metadata__\":[]," A_0_4 "}", 4, MALFORMED)             \
    X(metadata_that_is_not_strings, "{\"__metadata__\":{\"k\":1}," A_0_4 "}", 4, MALFORMED)        \
    X(a_not_a_number_literal,                                                                      \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[NaN],\"data_offsets\":[0,4]}}", 4, MALFORMED)          \
    X(a_number_beyond_64_bits,                                                                     \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[36893488147419103233],\"data_offsets\":[0,4]}}", 4,    \
      MALFORMED)                                                                                   \
    X(bytes_behind_the_last_tensor, "{" A_0_4 "}", 5, MALFORMED)                                   \
    X(bytes_without_any_tensor, "{}", 1, MALFORMED)                                                \
    X(an_entry_that_is_not_an_object, "{\"a\":3}", 0, TENSOR_INVALID)                              \
    X(an_entry_with_a_superfluous_field,                                                           \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4,               \
      TENSOR_INVALID)                                                                              \
    X(an_entry_without_dtype, "{\"a\":{\"x\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,   \
      TENSOR_INVALID)                                                                              \
    X(an_entry_without_shape, "{\"a\":{\"dtype\":\"F32\",\"x\":[1],\"data_offsets\":[0,4]}}", 4,   \
      TENSOR_INVALID)                                                                              \
    X(an_entry_without_offsets, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"x\":[0,4]}}", 4,        \
      TENSOR_INVALID)                                                                              \
    X(an_unknown_dtype, "{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,     \
      TENSOR_INVALID)                                                                              \
    X(a_lower_case_dtype, "{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,   \
      TENSOR_INVALID)                                                                              \
    X(a_negative_dimension, "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}",   \
      4, TENSOR_INVALID)                                                                           \
    X(two_negative_dimensions,                                                                     \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1,-1],\"data_offsets\":[0,4]}}", 4, TENSOR_INVALID)   \
    X(a_dimension_that_is_a_real,                                                                  \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],"                                                 \
      "\"data_offsets\":[0,4]}}",                                                                  \
      4, TENSOR_INVALID)                                                                           \
    X(a_dimension_that_is_a_string,                                                                \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[\"1\"],"                                               \
      "\"data_offsets\":[0,4]}}",                                                                  \
      4, TENSOR_INVALID)                                                                           \
    X(a_shape_whose_product_overflows,                                                             \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296,4],\"data_offsets\":[0,0]}}", 0, \
      TENSOR_INVALID)                                                                              \
    X(a_shape_whose_bits_overflow,                                                                 \
      "{\"a\":{\"dtype\":\"F64\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,     \
      TENSOR_INVALID)                                                                              \
    X(a_shape_larger_than_its_bytes,                                                               \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, TENSOR_INVALID)       \
    X(a_shape_smaller_than_its_bytes,                                                              \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, TENSOR_INVALID)       \
    X(a_size_that_is_not_whole_bytes,                                                              \
      "{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, TENSOR_INVALID)        \
    X(more_dimensions_than_supported,                                                              \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,       \
      TENSOR_INVALID)                                                                              \
    X(three_offsets, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4,      \
      TENSOR_INVALID)                                                                              \
    X(a_negative_offset, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4,   \
      TENSOR_INVALID)                                                                              \
    X(offsets_that_run_backwards,                                                                  \
      "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, TENSOR_INVALID)       \
    X(offsets_beyond_the_file, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", \
      4, TENSOR_INVALID)                                                                           \
    X(data_that_is_truncated, "{" A_0_4 "}", 3, TENSOR_INVALID)                                    \
    X(a_hole_at_the_start, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8,  \
      TENSOR_INVALID)                                                                              \
    X(a_hole_between_tensors,                                                                      \
      "{" A_0_4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}", 12,           \
      TENSOR_INVALID)                                                                              \
    X(overlapping_tensors,                                                                         \
      "{" A_0_4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}", 6,             \
      TENSOR_INVALID)                                                                              \
    X(two_tensors_on_the_same_bytes,                                                               \
      "{" A_0_4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,             \
      TENSOR_INVALID)                                                                              \
    X(an_empty_tensor_inside_another,                                                              \
      "{" A_0_4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[2,2]}}", 4,             \
      TENSOR_INVALID)

#define X(name, header, data_bytes, reason)                                                        \
    static void refuses_##name(void **state)                                                       \
    {                                                                                              \
        struct moe_st_file *file;                                                                  \
        check_reason(open_header(*state, header, data_bytes, &file), MOE_REASON_##reason);         \
    }
FAULTS(X)
#undef X

static void refuses_files_shorter_than_the_length_field(void **state)
{
    struct moe_st_file *file;
    for (size_t n = 0; n < 8; n++) {
        fixture_write(*state, "t", "\2\0\0\0\0\0\0", n);
        check_reason(moe_st_open(fixture_path(*state, "t"), &file), MOE_REASON_TRUNCATED);
    }
}

static void refuses_a_header_length_beyond_the_file(void **state)
{
    struct moe_st_file *file;
    check_reason(open_made(*state, 3, "{}", 2, 0, &file), MOE_REASON_TRUNCATED);
    check_reason(open_made(*state, 99999999, "{}", 2, 0, &file), MOE_REASON_TRUNCATED);
}

/* The length must be refused before anything of that size is allocated. */
static void refuses_an_oversized_header_length(void **state)
{
    struct moe_st_file *file;
    check_reason(open_made(*state, 100000001, "{}", 2, 0, &file), MOE_REASON_TOO_LARGE);
    check_reason(open_made(*state, UINT64_MAX, "{}", 2, 0, &file), MOE_REASON_TOO_LARGE);
    check_reason(open_made(*state, UINT64_MAX - 7, "{}", 2, 0, &file), MOE_REASON_TOO_LARGE);
}

/* Well-formed, but deeper than any parser's stack should go. */
static void refuses_endless_nesting(void **state)
{
    enum { DEPTH = 500000 };
    struct moe_st_file *file;
    char *header = malloc(2 * DEPTH + 8);
    assert_non_null(header);
    memcpy(header, "{\"a\":", 5);
    memset(header + 5, '[', DEPTH);
    memset(header + 5 + DEPTH, ']', DEPTH);
    memcpy(header + 5 + 2 * DEPTH, "}", 2);
    check_reason(open_header(*state, header, 0, &file), MOE_REASON_MALFORMED);
    free(header);
}

/* 50,000 names for the same four bytes: refused, and without taking quadratic time. */
static void refuses_many_tensors_on_one_range(void **state)
{
    enum { COUNT = 50000, ENTRY = 80 };
    struct moe_st_file *file;
    char *header = malloc((size_t)COUNT * ENTRY);
    assert_non_null(header);
    size_t n = 0;
    for (int i = 0; i < COUNT; i++)
        n += (size_t)sprintf(header + n,
                             "%c\"%d\":{\"dtype\":\"F32\",\"shape\":[1],"
                             "\"data_offsets\":[0,4]}",
                             i == 0 ? '{' : ',', i);
    header[n++] = '}';
    header[n] = '\0';
    check_reason(open_header(*state, header, 4, &file), MOE_REASON_TENSOR_INVALID);
    free(header);
}

/* ---- what a header may cost ---- */

/* The JSON library's memory: now, and at most. The size stands in front of each piece. */
static size_t json_bytes, json_bytes_most;

static void *count_malloc(size_t size)
{
    char *p = malloc(16 + size);
    if (p == NULL)
        return NULL;
    memcpy(p, &size, sizeof size);
    json_bytes += size;
    if (json_bytes > json_bytes_most)
        json_bytes_most = json_bytes;
    return p + 16;
}

static void count_free(void *p)
{
    size_t size;
    if (p == NULL)
        return;
    memcpy(&size, (char *)p - 16, sizeof size);
    json_bytes -= size;
    free((char *)p - 16);
}

static void start_counting(void)
{
    json_bytes = json_bytes_most = 0;
    json_set_alloc_funcs(count_malloc, count_free);
}

/* Ends counting; what was at most in use. */
static size_t stop_counting(void)
{
    json_set_alloc_funcs(malloc, free);
    assert_int_equal(json_bytes, 0);
    return json_bytes_most;
}

/* `count` empty tensors; the caller frees it. */
static char *header_of(size_t count)
{
    char *header = malloc(64 * count + 3), *at = header;
    assert_non_null(header);
    *at++ = '{';
    for (size_t i = 0; i < count; i++)
        at += sprintf(at, "%s\"%zu\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                      i > 0 ? "," : "", i);
    strcpy(at, "}");
    return header;
}

static void a_header_of_a_million_tensors_is_refused_before_it_costs_anything(void **state)
{
    struct moe_st_file *file;
    char *header = header_of(1200000);
    start_counting();
    struct moe_status st = open_header(*state, header, 0, &file);
    size_t most = stop_counting();
    free(header);
    check_reason(st, MOE_REASON_TOO_LARGE);
    print_message("  %s; %zu bytes of JSON tree\n", st.text, most);
    assert_int_equal(most, 0);
}

static void a_header_is_not_read_as_one_tree(void **state)
{
    enum { COUNT = 20000 };
    struct moe_st_file *file;
    char *header = header_of(COUNT);
    start_counting();
    struct moe_status st = open_header(*state, header, 0, &file);
    size_t most = stop_counting();
    free(header);
    assert_ok(st);
    assert_int_equal(moe_st_count(file), COUNT);
    assert_non_null(moe_st_find(file, "0"));
    assert_non_null(moe_st_find(file, "19999"));
    assert_null(moe_st_find(file, "20000"));
    moe_st_close(file);
    print_message("  %zu bytes of JSON tree at most\n", most);
    assert_true(most < 8192);
}

/* `{"a":[[],[],...]}` and the like, 3 MB long. */
static void an_entry_and_metadata_are_bounded_as_well(void **state)
{
    enum { PAIRS = 1000000 };
    static const char *const names[] = {"a", "__metadata__"};
    struct moe_st_file *file;
    for (size_t n = 0; n < 2; n++) {
        char *header = malloc(3 * PAIRS + 64), *at = header;
        assert_non_null(header);
        at += sprintf(at, "{\"%s\":[", names[n]);
        for (size_t i = 0; i < PAIRS; i++)
            at += sprintf(at, "%s[]", i > 0 ? "," : "");
        strcpy(at, "]}");
        start_counting();
        struct moe_status st = open_header(*state, header, 0, &file);
        size_t most = stop_counting();
        free(header);
        check_reason(st, n == 0 ? MOE_REASON_MALFORMED : MOE_REASON_TOO_LARGE);
        assert_true(most < 8192);
    }
}

static void a_json_document_has_a_bounded_number_of_values(void **state)
{
    (void)state;
    size_t length = 2 * MOE_JSON_VALUES_MAX + 16;
    char *text = malloc(length + 1);
    json_t *root = NULL;
    assert_non_null(text);
    /* {"a":[1,1,...]}: the object, the list and the numbers */
    for (int over = 0; over < 2; over++) {
        size_t count = MOE_JSON_VALUES_MAX - 2 + (size_t)over, n;
        n = (size_t)sprintf(text, "{\"a\":[1");
        for (size_t i = 1; i < count; i++) {
            text[n++] = ',';
            text[n++] = '1';
        }
        strcpy(text + n, "]}");
        struct moe_status st = moe_json_parse(text, n + 2, "a document", &root);
        if (over) {
            check_reason(st, MOE_REASON_TOO_LARGE);
            break;
        }
        assert_ok(st);
        json_decref(root);
    }
    /* Brackets and commas in strings are text. */
    memset(text, ',', length);
    memcpy(text, "{\"a\":\"", 6);
    memcpy(text + length - 4, "\\\"\"}", 4);
    assert_ok(moe_json_parse(text, length, "a document", &root));
    json_decref(root);
    free(text);
}

static void refuses_a_zero_byte_behind_the_header(void **state)
{
    struct moe_st_file *file;
    check_reason(open_made(*state, 3, "{}\0", 3, 0, &file), MOE_REASON_MALFORMED);
}

static void refuses_links_directories_and_names_that_leave(void **state)
{
    struct fixture *f = *state;
    struct moe_st_file *file;
    assert_ok(moe_st_write(fixture_path(f, "real"), NULL, 0, NULL));
    assert_int_equal(symlinkat("real", f->fd, "link"), 0);
    assert_int_equal(mkdirat(f->fd, "folder", 0700), 0);
    assert_int_equal(mkfifoat(f->fd, "pipe", 0600), 0);
    check_reason(moe_st_open_at(f->fd, "link", &file), MOE_REASON_IO);
    check_reason(moe_st_open_at(f->fd, "folder", &file), MOE_REASON_IO);
    check_reason(moe_st_open_at(f->fd, "pipe", &file), MOE_REASON_IO);
    check_reason(moe_st_open_at(f->fd, "missing", &file), MOE_REASON_IO);
    static const char *const names[] = {"../real", "./real", "/etc/passwd", "folder/x", "..",
                                        ".",       "",       ".hidden",     "a b",      "a\n"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        check_reason(moe_st_open_at(f->fd, names[i], &file), MOE_REASON_MALFORMED);
    assert_ok(moe_st_open_at(f->fd, "real", &file));
    assert_int_equal(moe_st_count(file), 0);
    moe_st_close(file);
}

/* ---- files that must be read ---- */

static void reads_scalars_empty_tensors_and_unaligned_data(void **state)
{
    /* The header is 1 byte short of any alignment, and `b` starts at byte 1. */
    static const char header[] =
        "{\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[1,5]},"
        "\"e\":{\"dtype\":\"BF16\",\"shape\":[3,0,7],\"data_offsets\":[1,1]},"
        "\"z\":{\"dtype\":\"BF16\",\"shape\":[0],\"data_offsets\":[5,5]},"
        "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}  ";
    struct moe_st_file *file;
    assert_ok(open_header(*state, header, 5, &file));
    assert_int_equal(moe_st_count(file), 4);
    assert_string_equal(moe_st_tensor(file, 0)->name, "a");
    assert_string_equal(moe_st_tensor(file, 1)->name, "e");
    assert_string_equal(moe_st_tensor(file, 2)->name, "b");
    assert_string_equal(moe_st_tensor(file, 3)->name, "z");
    assert_null(moe_st_tensor(file, 4));
    const struct moe_tensor *b = moe_st_find(file, "b");
    assert_non_null(b);
    assert_int_equal(b->rank, 0);
    assert_int_equal(b->bytes, 4);
    assert_int_equal(b->offset, 8 + strlen(header) + 1);
    float value = 1;
    assert_ok(moe_st_read(file, b, 0, 4, &value));
    assert_true(value == 0);
    assert_ok(moe_st_read(file, b, 4, 0, &value));
    check_reason(moe_st_read(file, b, 1, 4, &value), MOE_REASON_TENSOR_INVALID);
    check_reason(moe_st_read(file, b, 5, 0, &value), MOE_REASON_TENSOR_INVALID);
    check_reason(moe_st_read(file, b, 1, UINT64_MAX, &value), MOE_REASON_TENSOR_INVALID);
    assert_null(moe_st_find(file, "c"));
    assert_null(moe_st_find(file, ""));
    moe_st_close(file);
}

static void reads_formats_narrower_than_a_byte(void **state)
{
    static const char header[] = "{\"f\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":"
                                 "[0,3]},\"g\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":"
                                 "[3,4]}}";
    struct moe_st_file *file;
    assert_ok(open_header(*state, header, 4, &file));
    assert_int_equal(moe_st_find(file, "f")->bytes, 3);
    assert_int_equal(moe_st_find(file, "g")->bytes, 1);
    moe_st_close(file);
}

static void a_file_that_shrinks_while_open_is_an_error_not_a_signal(void **state)
{
    struct moe_st_file *file;
    char bytes[4096];
    assert_ok(open_header(*state,
                          "{\"a\":{\"dtype\":\"U8\",\"shape\":[4096],\"data_offsets\":[0,4096]}}",
                          4096, &file));
    assert_int_equal(truncate(fixture_path(*state, "t"), 1000), 0);
    check_reason(moe_st_read(file, moe_st_find(file, "a"), 0, 4096, bytes), MOE_REASON_TRUNCATED);
    moe_st_close(file);
}

static void reads_the_golden_files_of_transformers(void **state)
{
    (void)state;
    struct moe_st_file *file;
    assert_ok(moe_st_open(MOE_GOLDEN_DIR "/mixtral/golden.safetensors", &file));
    const struct moe_tensor *x = moe_st_find(file, "layer0.T37.x");
    assert_non_null(x);
    assert_int_equal(x->dtype, MOE_ST_F32);
    assert_int_equal(x->rank, 2);
    assert_int_equal(x->shape[0], 37);
    assert_int_equal(x->shape[1], 64);
    moe_st_close(file);
}

/* ---- writing ---- */

static struct moe_st_out random_tensor(size_t i, char *name, uint8_t **data)
{
    struct moe_st_out t = {.name = name};
    sprintf(name, "%c.tensor \"%zu\" \xc3\xbc", (char)('a' + random_below(26)), i);
    t.dtype = (enum moe_st_dtype)random_below(MOE_ST_DTYPE_COUNT);
    t.rank = random_below(4);
    for (uint32_t d = 0; d < t.rank; d++)
        t.shape[d] = random_below(5);
    /* Formats of 4 and 6 bits need a count that fills whole bytes. */
    if (moe_st_dtype_bits(t.dtype) < 8)
        t.shape[t.rank++] = 4;
    uint64_t bytes;
    assert_true(moe_st_tensor_bytes(t.dtype, t.rank, t.shape, &bytes));
    *data = malloc((size_t)bytes + 1);
    assert_non_null(*data);
    fill_random(*data, (size_t)bytes);
    t.data = *data;
    return t;
}

static void check_same(const struct moe_st_file *file, const struct moe_st_out *want)
{
    const struct moe_tensor *got = moe_st_find(file, want->name);
    assert_non_null(got);
    assert_int_equal(got->dtype, want->dtype);
    assert_int_equal(got->rank, want->rank);
    assert_memory_equal(got->shape, want->shape, want->rank * sizeof want->shape[0]);
    uint8_t *bytes = malloc((size_t)got->bytes + 1);
    assert_non_null(bytes);
    assert_ok(moe_st_read(file, got, 0, got->bytes, bytes));
    assert_memory_equal(bytes, want->data, (size_t)got->bytes);
    free(bytes);
}

static void written_tensors_are_read_back(void **state)
{
    enum { COUNT = 40, ROUNDS = 20 };
    static const char *const metadata[] = {"format", "pt", "k\"ey", "va\nlue \xe2\x82\xac", NULL};
    seed_random();
    struct moe_st_out tensors[COUNT];
    char names[COUNT][64];
    uint8_t *data[COUNT];
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < COUNT; i++)
            tensors[i] = random_tensor(i, names[i], &data[i]);
        assert_ok(moe_st_write(fixture_path(*state, "w"), tensors, COUNT, metadata));
        struct moe_st_file *file;
        assert_ok(moe_st_open(fixture_path(*state, "w"), &file));
        assert_int_equal(moe_st_count(file), COUNT);
        for (size_t i = 0; i < COUNT; i++)
            check_same(file, &tensors[i]);
        for (size_t i = 0; i + 1 < COUNT; i++)
            assert_true(moe_st_dtype_bits(moe_st_tensor(file, i)->dtype) >=
                            moe_st_dtype_bits(moe_st_tensor(file, i + 1)->dtype) ||
                        moe_st_tensor(file, i)->bytes == 0);
        assert_int_equal(moe_st_tensor(file, 0)->offset % 8, 0);
        check_header_has(*state, "w", "\"k\\\"ey\":\"va\\nlue \xe2\x82\xac\"");
        moe_st_close(file);
        for (size_t i = 0; i < COUNT; i++)
            free(data[i]);
    }
}

/* An open reader goes on seeing the old bytes; a new one sees the new file. */
static void writing_replaces_a_file_without_disturbing_its_readers(void **state)
{
    uint8_t one = 1, two = 2, got = 0;
    struct moe_st_out t = {.name = "a", .dtype = MOE_ST_U8, .rank = 1, .shape = {1}, .data = &one};
    struct moe_st_file *before, *after;
    assert_ok(moe_st_write(fixture_path(*state, "w"), &t, 1, NULL));
    assert_ok(moe_st_open(fixture_path(*state, "w"), &before));
    t.data = &two;
    assert_ok(moe_st_write(fixture_path(*state, "w"), &t, 1, NULL));
    assert_ok(moe_st_open(fixture_path(*state, "w"), &after));
    assert_ok(moe_st_read(before, moe_st_find(before, "a"), 0, 1, &got));
    assert_int_equal(got, 1);
    assert_ok(moe_st_read(after, moe_st_find(after, "a"), 0, 1, &got));
    assert_int_equal(got, 2);
    moe_st_close(before);
    moe_st_close(after);
}

static void a_failed_write_keeps_the_old_file(void **state)
{
    struct fixture *f = *state;
    uint8_t one = 1, got = 0;
    struct moe_st_out t[2] = {
        {.name = "a", .dtype = MOE_ST_U8, .rank = 1, .shape = {1}, .data = &one},
        {.name = "a", .dtype = MOE_ST_U8, .rank = 1, .shape = {1}, .data = &one}};
    struct moe_st_file *file;
    assert_ok(moe_st_write(fixture_path(f, "w"), t, 1, NULL));
    check_reason(moe_st_write(fixture_path(f, "w"), t, 2, NULL), MOE_REASON_TENSOR_INVALID);
    t[1].name = "__metadata__";
    check_reason(moe_st_write(fixture_path(f, "w"), t, 2, NULL), MOE_REASON_TENSOR_INVALID);
    t[1].name = "\xff";
    check_reason(moe_st_write(fixture_path(f, "w"), t, 2, NULL), MOE_REASON_TENSOR_INVALID);
    t[1].name = "b";
    t[1].rank = 2;
    t[1].shape[0] = t[1].shape[1] = UINT64_C(1) << 40;
    check_reason(moe_st_write(fixture_path(f, "w"), t, 2, NULL), MOE_REASON_TENSOR_INVALID);
    check_reason(moe_st_write(fixture_path(f, "none/w"), t, 1, NULL), MOE_REASON_IO);
    /* A directory in the way makes the rename itself fail, after the temporary file exists. */
    assert_int_equal(mkdirat(f->fd, "taken", 0700), 0);
    check_reason(moe_st_write(fixture_path(f, "taken"), t, 1, NULL), MOE_REASON_IO);
    assert_int_equal(unlinkat(f->fd, "taken", AT_REMOVEDIR), 0);

    assert_ok(moe_st_open(fixture_path(f, "w"), &file));
    assert_ok(moe_st_read(file, moe_st_find(file, "a"), 0, 1, &got));
    assert_int_equal(got, 1);
    moe_st_close(file);
    /* A temporary file that a crashed writer left is not in the way, and not touched. */
    char stale[64];
    snprintf(stale, sizeof stale, "w.%ld.0.tmp", (long)getpid());
    fixture_write_text(f, stale, "stale");
    assert_ok(moe_st_write(fixture_path(f, "w"), t, 1, NULL));
    assert_int_equal(unlinkat(f->fd, stale, 0), 0);
    /* No temporary file stays behind: with "w" gone, the directory is empty. */
    assert_int_equal(unlinkat(f->fd, "w", 0), 0);
    assert_int_equal(rmdir(f->directory), 0);
    assert_int_equal(mkdir(f->directory, 0700), 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

#define X(name, header, data_bytes, reason) TEST(refuses_##name),
    const struct CMUnitTest tests[] = {
        FAULTS(X) TEST(refuses_files_shorter_than_the_length_field),
        TEST(refuses_a_header_length_beyond_the_file),
        TEST(refuses_an_oversized_header_length),
        TEST(refuses_endless_nesting),
        TEST(refuses_many_tensors_on_one_range),
        TEST(refuses_a_zero_byte_behind_the_header),
        TEST(a_header_of_a_million_tensors_is_refused_before_it_costs_anything),
        TEST(a_header_is_not_read_as_one_tree),
        TEST(an_entry_and_metadata_are_bounded_as_well),
        TEST(a_json_document_has_a_bounded_number_of_values),
        TEST(refuses_links_directories_and_names_that_leave),
        TEST(reads_scalars_empty_tensors_and_unaligned_data),
        TEST(reads_formats_narrower_than_a_byte),
        TEST(a_file_that_shrinks_while_open_is_an_error_not_a_signal),
        TEST(reads_the_golden_files_of_transformers),
        TEST(written_tensors_are_read_back),
        TEST(writing_replaces_a_file_without_disturbing_its_readers),
        TEST(a_failed_write_keeps_the_old_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
