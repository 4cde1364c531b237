/* SPDX-License-Identifier: Apache-2.0 */
/* The runner for fuzz targets without libFuzzer: mutates seeds and replays findings.
 *
 * A target is one file that includes driver.h and defines
 *
 *     int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);  // must return 0
 *     size_t moe_fuzz_seed(size_t i, const uint8_t **data);          // built-in seeds; optional
 *
 * `moe_fuzz_seed` returns the length of seed i and points `*data` at it (valid until the next
 * call), or 0 when there are no more. Linked with this file, the target is an ordinary program that
 * mutates the seeds a fixed number of times: a deterministic ctest test that any compiler can
 * build. Linked with -fsanitize=fuzzer instead of this file (option MOE_FUZZ), it is a libFuzzer
 * target.
 *
 *     fuzz_x [-n MUTATIONS] [-m MAX_BYTES] [FILE ...]    mutate the seeds and the files
 *     fuzz_x -n 0 FILE ...                               only run the files: replays a finding
 *
 * MOE_SEED sets the random sequence (printed at the start). On a crash the last line has the number
 * of the mutation: the same seed with that number as -n reproduces it. */
#include "driver.h"
#include "support/random.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct input {
    uint8_t *data;
    size_t size;
};

enum { SEEDS_MAX = 256, EDITS_MAX = 6, CHUNK_MAX = 32 };

static struct input seeds[SEEDS_MAX];
static size_t seed_count;
static struct rng sequence;
static volatile sig_atomic_t mutation_now;

static size_t below(size_t n)
{
    return n == 0 ? 0 : (size_t)(rng_next(&sequence) % n);
}

static void die(const char *what)
{
    perror(what);
    exit(2);
}

static void add_seed(const uint8_t *data, size_t size)
{
    if (seed_count == SEEDS_MAX) {
        fprintf(stderr, "more than %d seeds\n", SEEDS_MAX);
        exit(2);
    }
    struct input *s = &seeds[seed_count++];
    s->size = size;
    s->data = malloc(size + 1);
    if (s->data == NULL)
        die("seed");
    if (size > 0)
        memcpy(s->data, data, size);
}

static void add_file(const char *path, size_t max)
{
    FILE *f = fopen(path, "rb");
    uint8_t *buffer = malloc(max);
    if (f == NULL || buffer == NULL)
        die(path);
    size_t n = fread(buffer, 1, max, f);
    if (ferror(f))
        die(path);
    fclose(f);
    add_seed(buffer, n);
    free(buffer);
}

/* Pieces that often break parsers: numbers at the edge of a type, brackets, quotes. */
static const char *const tokens[] = {"0",
                                     "-1",
                                     "4294967296",
                                     "9223372036854775807",
                                     "18446744073709551616",
                                     "1e999",
                                     "NaN",
                                     "null",
                                     "true",
                                     "\"\"",
                                     "{",
                                     "}",
                                     "[",
                                     "]",
                                     ",",
                                     ":",
                                     "\"",
                                     "\\u0000",
                                     "\xff\xfe",
                                     "../",
                                     "[[[[[[[[",
                                     "{}",
                                     "[]",
                                     " ",
                                     "\xc0\x80",
                                     "0.0",
                                     "1",
                                     "2",
                                     "64",
                                     "1000000000000"};

/* Opens a gap of `n` bytes at `at`; false if the result would be longer than `max`. */
static int open_gap(struct input *in, size_t at, size_t n, size_t max)
{
    if (in->size + n > max)
        return 0;
    memmove(in->data + at + n, in->data + at, in->size - at);
    in->size += n;
    return 1;
}

static void insert_token(struct input *in, size_t max)
{
    const char *t = tokens[below(sizeof tokens / sizeof tokens[0])];
    size_t n = strlen(t), at = below(in->size + 1);
    if (open_gap(in, at, n, max))
        memcpy(in->data + at, t, n);
}

static void erase_chunk(struct input *in)
{
    size_t at = below(in->size), n = 1 + below(CHUNK_MAX);
    if (n > in->size - at)
        n = in->size - at;
    memmove(in->data + at, in->data + at + n, in->size - at - n);
    in->size -= n;
}

/* Copies a piece of any seed over or into the input. */
static void splice(struct input *in, size_t max)
{
    const struct input *from = &seeds[below(seed_count)];
    if (from->size == 0)
        return;
    size_t start = below(from->size), n = 1 + below(CHUNK_MAX), at = below(in->size + 1);
    if (n > from->size - start)
        n = from->size - start;
    if (open_gap(in, at, n, max))
        memcpy(in->data + at, from->data + start, n);
}

static void edit(struct input *in, size_t max)
{
    size_t at = below(in->size);
    uint8_t *b = in->data + at;
    switch (in->size == 0 ? 4 : below(8)) {
    case 0: *b ^= (uint8_t)(1u << below(8)); break;
    case 1: *b = (uint8_t)rng_next(&sequence); break;
    case 2: *b = (uint8_t)(*b + (below(2) ? 1 : -1)); break;
    case 3: erase_chunk(in); break;
    case 4: insert_token(in, max); break;
    case 5: splice(in, max); break;
    case 6: in->size = at; break;
    default: /* a digit becomes another digit: keeps the syntax, changes the meaning */
        if (*b >= '0' && *b <= '9')
            *b = (uint8_t)('0' + below(10));
    }
}

/* Only async-signal-safe calls: prints the number of the mutation, then lets the signal kill. */
static void on_crash(int signal_number)
{
    char text[64] = "crash at mutation ";
    size_t n = strlen(text);
    unsigned long v = (unsigned long)mutation_now;
    char digits[24];
    size_t d = 0;
    do {
        digits[d++] = (char)('0' + v % 10);
        v /= 10;
    } while (v != 0);
    while (d > 0)
        text[n++] = digits[--d];
    text[n++] = '\n';
    if (write(STDERR_FILENO, text, n) < 0)
        _exit(3);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void run_one(const struct input *in)
{
    /* An exact-size copy, so that the sanitizer sees a read one byte past the end. */
    uint8_t *copy = malloc(in->size == 0 ? 1 : in->size);
    if (copy == NULL)
        die("input");
    if (in->size > 0)
        memcpy(copy, in->data, in->size);
    if (LLVMFuzzerTestOneInput(copy, in->size) != 0) {
        fprintf(stderr, "the target rejected mutation %d\n", (int)mutation_now);
        exit(1);
    }
    free(copy);
}

static void mutate(size_t mutations, size_t max)
{
    struct input in = {.data = malloc(max)};
    if (in.data == NULL)
        die("input");
    for (size_t i = 1; i <= mutations; i++) {
        mutation_now = (sig_atomic_t)i;
        const struct input *s = &seeds[below(seed_count)];
        in.size = s->size < max ? s->size : max;
        memcpy(in.data, s->data, in.size);
        for (size_t k = 1 + below(EDITS_MAX); k > 0; k--)
            edit(&in, max);
        run_one(&in);
    }
    free(in.data);
}

int main(int argc, char **argv)
{
    size_t mutations = 20000, max = 64 * 1024;
    int c;
    while ((c = getopt(argc, argv, "n:m:")) != -1) {
        if (c == 'n')
            mutations = strtoull(optarg, NULL, 10);
        else if (c == 'm')
            max = strtoull(optarg, NULL, 10);
        else
            return 2;
    }
    if (max == 0)
        return 2;
    for (int i = optind; i < argc; i++)
        add_file(argv[i], max);
    const uint8_t *data;
    size_t n;
    for (size_t i = 0; moe_fuzz_seed != NULL && (n = moe_fuzz_seed(i, &data)) > 0; i++)
        add_seed(data, n);
    if (seed_count == 0)
        add_seed(NULL, 0);

    sequence.state = seed_from_environment(1);
    printf("seeds %zu, mutations %zu, MOE_SEED=%" PRIu64 "\n", seed_count, mutations,
           sequence.state);
    fflush(stdout);
#ifndef __SANITIZE_ADDRESS__
    signal(SIGSEGV, on_crash);
#endif
    signal(SIGABRT, on_crash);
    for (size_t i = 0; i < seed_count; i++)
        run_one(&seeds[i]);
    mutate(mutations, max);
    for (size_t i = 0; i < seed_count; i++)
        free(seeds[i].data);
    printf("done\n");
    return 0;
}
