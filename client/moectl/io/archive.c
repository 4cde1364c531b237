/* SPDX-License-Identifier: Apache-2.0 */
#include "moectl/io/archive.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 512, SECRETS_MAX = 64, SECRET_MIN_BYTES = 8, FOLDER_BYTES = 64 };

static const char removed[] = "[removed]", key_begins[] = "-----BEGIN ", key_word[] = "PRIVATE KEY",
                  key_ends[] = "-----END ", bearer[] = "Bearer ";

struct moectl_archive {
    FILE *file;
    char *path, folder[FOLDER_BYTES];
    char *secrets[SECRETS_MAX];
    size_t secret_count;
    bool no_memory;
};

struct moe_status moectl_archive_create(const char *path, const char *folder,
                                        struct moectl_archive **out)
{
    struct moectl_archive *a = calloc(1, sizeof *a);
    int fd =
        a != NULL ? open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600) : -1;
    if (fd < 0) {
        struct moe_status st =
            moe_error(errno == EEXIST ? MOE_ALREADY_EXISTS : MOE_UNKNOWN, MOE_REASON_NONE,
                      "cannot create %s: %s", path, strerror(errno));
        free(a);
        return st;
    }
    (void)snprintf(a->folder, sizeof a->folder, "%s", folder);
    a->path = strdup(path);
    a->file = fdopen(fd, "w");
    if (a->file == NULL)
        close(fd);
    *out = a;
    return moe_ok();
}

void moectl_archive_hide(struct moectl_archive *a, const char *secret)
{
    if (strlen(secret) < SECRET_MIN_BYTES || a->secret_count == SECRETS_MAX)
        return;
    a->secrets[a->secret_count] = strdup(secret);
    a->no_memory = a->no_memory || a->secrets[a->secret_count] == NULL;
    a->secret_count += a->secrets[a->secret_count] != NULL;
}

/* ------------------------------------------------------------------ secrets */

/* Bytes of the hidden text that begins here; 0 when none does. */
static size_t hidden_length(const struct moectl_archive *a, const char *at)
{
    size_t longest = 0;
    for (size_t i = 0; i < a->secret_count; i++) {
        size_t length = strlen(a->secrets[i]);
        if (length > longest && strncmp(at, a->secrets[i], length) == 0)
            longest = length;
    }
    return longest;
}

/* Bytes of the private key that begins here, to the end of its last line. */
static size_t key_length(const char *at)
{
    if (strncmp(at, key_begins, sizeof key_begins - 1) != 0)
        return 0;
    size_t line = strcspn(at, "\n");
    const char *word = strstr(at, key_word);
    if (word == NULL || (size_t)(word - at) > line)
        return 0;
    const char *end = strstr(at, key_ends);
    return end != NULL ? (size_t)(end - at) + strcspn(end, "\n") : strlen(at);
}

static bool copy_without_secrets(const struct moectl_archive *a, const char *text, FILE *to)
{
    while (*text != '\0') {
        size_t skipped = hidden_length(a, text);
        if (skipped == 0)
            skipped = key_length(text);
        if (skipped == 0 && strncasecmp(text, bearer, sizeof bearer - 1) == 0) {
            fputs(bearer, to);
            text += sizeof bearer - 1;
            text += strspn(text, " \t");
            skipped = strcspn(text, " \t\r\n\"'");
        }
        if (skipped > 0)
            fputs(removed, to);
        else
            fputc(*text++, to);
        text += skipped;
    }
    return ferror(to) == 0;
}

/* ------------------------------------------------------------------ tar */

static void put_octal(char *to, size_t digits, uint64_t value)
{
    to[digits] = '\0';
    for (size_t i = digits; i-- > 0; value >>= 3)
        to[i] = (char)('0' + (value & 7));
}

/* POSIX.1-1988 ustar: fields at fixed places, numbers in octal digits. */
static void fill_header(const struct moectl_archive *a, const char *name, size_t length,
                        char h[BLOCK])
{
    unsigned sum = 0;
    memset(h, 0, BLOCK);
    (void)snprintf(h, 100, "%s/%s", a->folder, name);
    put_octal(h + 100, 7, 0600);
    put_octal(h + 108, 7, 0);
    put_octal(h + 116, 7, 0);
    put_octal(h + 124, 11, length);
    put_octal(h + 136, 11, (uint64_t)time(NULL));
    memset(h + 148, ' ', 8);
    h[156] = '0';
    memcpy(h + 257, "ustar\00000", 8);
    for (size_t i = 0; i < BLOCK; i++)
        sum += (unsigned char)h[i];
    put_octal(h + 148, 6, sum);
}

static void write_entry(struct moectl_archive *a, const char *name, const char *text, size_t length)
{
    char header[BLOCK], padding[BLOCK] = "";
    fill_header(a, name, length, header);
    fwrite(header, 1, BLOCK, a->file);
    fwrite(text, 1, length, a->file);
    fwrite(padding, 1, (BLOCK - length % BLOCK) % BLOCK, a->file);
}

void moectl_archive_add(struct moectl_archive *a, const char *name, const char *text)
{
    char *clean = NULL;
    size_t length = 0;
    FILE *to = a->file != NULL ? open_memstream(&clean, &length) : NULL;
    bool good = to != NULL && copy_without_secrets(a, text, to);
    good = to != NULL && fclose(to) == 0 && good;
    if (good)
        write_entry(a, name, clean, length);
    a->no_memory = a->no_memory || !good;
    free(clean);
}

struct moe_status moectl_archive_close(struct moectl_archive *a)
{
    char end[2 * BLOCK] = "";
    bool good = a->file != NULL && a->path != NULL && !a->no_memory;
    if (a->file != NULL)
        fwrite(end, 1, sizeof end, a->file);
    good = good && ferror(a->file) == 0;
    good = a->file != NULL && fclose(a->file) == 0 && good;
    struct moe_status st = good ? moe_ok()
                                : moe_error(MOE_UNKNOWN, MOE_REASON_NONE, "cannot write %s: %s",
                                            a->path != NULL ? a->path : "the archive",
                                            a->no_memory ? "out of memory" : strerror(errno));
    if (!good && a->path != NULL)
        (void)unlink(a->path);
    for (size_t i = 0; i < a->secret_count; i++)
        free(a->secrets[i]);
    free(a->path);
    free(a);
    return st;
}
