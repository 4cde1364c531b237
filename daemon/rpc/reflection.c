/* SPDX-License-Identifier: Apache-2.0 */
/* Server reflection (grpc.reflection.v1, and v1alpha with the same wire format) from the embedded
 * FileDescriptorSet: an index of files and of the names they declare. Answers contain descriptors
 * unchanged; only the index decodes them. */
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "rpc/serving.h"
#include "rpc/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILES_MAX = 64, SYMBOLS_MAX = 4096, DEPENDENCIES_MAX = 32, NAME_BYTES = 256 };

/* Bytes inside the descriptor set. */
struct span {
    const uint8_t *bytes;
    size_t length;
};

struct file {
    struct span name, package, content;
    struct span dependencies[DEPENDENCIES_MAX];
    size_t dependency_count;
};

struct symbol {
    char *name; /* fully qualified, without a leading dot */
    uint16_t file;
    bool served; /* a service with a method on the server */
};

struct moe_rpc_reflection {
    struct file files[FILES_MAX];
    size_t file_count;
    struct symbol symbols[SYMBOLS_MAX]; /* sorted by name once the index is built */
    size_t symbol_count;
};

/* ------------------------------------------------------------------ index */

/* Field numbers of descriptor.proto. Every declaration has its name in field 1. */
enum {
    SET_FILE = 1,
    FILE_PACKAGE = 2,
    FILE_DEPENDENCY = 3,
    FILE_MESSAGE = 4,
    FILE_ENUM = 5,
    FILE_SERVICE = 6,
    MESSAGE_FIELD = 2,
    MESSAGE_NESTED = 3,
    MESSAGE_ENUM = 4,
    MESSAGE_ONEOF = 8,
    ENUM_VALUE = 2,
    SERVICE_METHOD = 2,
};

static struct moe_status bad_set(const char *what)
{
    return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED, "descriptor set: %s", what);
}

static struct span span_of(const struct moe_wire_field *f)
{
    return (struct span){f->bytes, f->length};
}

/* The first length-delimited field `number` of `message`; empty when there is none. */
static struct span child(struct span message, uint32_t number)
{
    struct moe_wire_field f;
    for (size_t at = 0; moe_wire_next(message.bytes, message.length, &at, &f);) {
        if (f.number == number && f.type == MOE_WIRE_BYTES)
            return span_of(&f);
    }
    return (struct span){0};
}

/* Kinds of declarations that can contain others. */
enum declaration { DECLARES_MESSAGE, DECLARES_ENUM, DECLARES_SERVICE, DECLARES_MEMBER };

struct walk {
    struct moe_rpc_reflection *index;
    uint16_t file;
};

static struct moe_status add(struct walk *w, const char *scope, struct span name,
                             char full[NAME_BYTES])
{
    struct moe_rpc_reflection *r = w->index;
    size_t prefix = strlen(scope);
    if (prefix + 1 + name.length >= NAME_BYTES || r->symbol_count == SYMBOLS_MAX)
        return bad_set("too many or too long names");
    memcpy(full, scope, prefix);
    if (prefix > 0)
        full[prefix++] = '.';
    memcpy(full + prefix, name.bytes, name.length);
    full[prefix + name.length] = '\0';
    char *copy = strdup(full);
    if (copy == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for the reflection index");
    r->symbols[r->symbol_count++] = (struct symbol){.name = copy, .file = w->file};
    return moe_ok();
}

/* The kind that field `number` of a declaration of kind `in` declares; false if it declares none.
 */
static bool declares(enum declaration in, uint32_t number, enum declaration *what)
{
    *what = DECLARES_MEMBER;
    switch (in) {
    case DECLARES_ENUM: return false; /* values are siblings of their enum */
    case DECLARES_SERVICE: return number == SERVICE_METHOD;
    case DECLARES_MEMBER: return false;
    case DECLARES_MESSAGE: break;
    }
    if (number == MESSAGE_NESTED)
        *what = DECLARES_MESSAGE;
    if (number == MESSAGE_ENUM)
        *what = DECLARES_ENUM;
    return number == MESSAGE_FIELD || number == MESSAGE_NESTED || number == MESSAGE_ENUM ||
           number == MESSAGE_ONEOF;
}

/* The depth of recursion is that of nested messages in the embedded proto files. */
static struct moe_status declare(struct walk *w, enum declaration kind, const char *scope,
                                 struct span content)
{
    char full[NAME_BYTES];
    char ignored[NAME_BYTES];
    struct moe_wire_field f;
    enum declaration inner;
    MOE_TRY(add(w, scope, child(content, 1), full));
    for (size_t at = 0; moe_wire_next(content.bytes, content.length, &at, &f);) {
        if (f.type != MOE_WIRE_BYTES)
            continue;
        if (kind == DECLARES_ENUM && f.number == ENUM_VALUE)
            MOE_TRY(add(w, scope, child(span_of(&f), 1), ignored));
        if (declares(kind, f.number, &inner))
            MOE_TRY(declare(w, inner, full, span_of(&f)));
    }
    return moe_ok();
}

static struct moe_status add_file(struct moe_rpc_reflection *r, struct span content)
{
    char package[NAME_BYTES];
    struct moe_wire_field f;
    if (r->file_count == FILES_MAX)
        return bad_set("too many files");
    struct walk w = {.index = r, .file = (uint16_t)r->file_count};
    struct file *file = &r->files[r->file_count++];
    file->content = content;
    file->name = child(content, 1);
    file->package = child(content, FILE_PACKAGE);
    if (file->name.length == 0 || file->package.length >= NAME_BYTES)
        return bad_set("a file without a name, or with a package name that is too long");
    if (file->package.length > 0)
        memcpy(package, file->package.bytes, file->package.length);
    package[file->package.length] = '\0';
    size_t at = 0;
    while (moe_wire_next(content.bytes, content.length, &at, &f)) {
        if (f.type != MOE_WIRE_BYTES)
            continue;
        if (f.number == FILE_DEPENDENCY) {
            if (file->dependency_count == DEPENDENCIES_MAX)
                return bad_set("too many imports");
            file->dependencies[file->dependency_count++] = span_of(&f);
        } else if (f.number == FILE_MESSAGE) {
            MOE_TRY(declare(&w, DECLARES_MESSAGE, package, span_of(&f)));
        } else if (f.number == FILE_ENUM) {
            MOE_TRY(declare(&w, DECLARES_ENUM, package, span_of(&f)));
        } else if (f.number == FILE_SERVICE) {
            MOE_TRY(declare(&w, DECLARES_SERVICE, package, span_of(&f)));
        }
    }
    return at == content.length ? moe_ok() : bad_set("malformed file");
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct symbol *)a)->name, ((const struct symbol *)b)->name);
}

struct moe_status moe_rpc_reflection_create(const uint8_t *descriptors, size_t length,
                                            struct moe_rpc_reflection **out)
{
    struct moe_wire_field f;
    struct moe_status st = moe_ok();
    struct moe_rpc_reflection *r = calloc(1, sizeof *r);
    *out = NULL;
    if (r == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                         "out of memory for the reflection index");
    size_t at = 0;
    while (!moe_failed(&st) && moe_wire_next(descriptors, length, &at, &f)) {
        if (f.number == SET_FILE && f.type == MOE_WIRE_BYTES)
            st = add_file(r, span_of(&f));
    }
    if (!moe_failed(&st) && at != length)
        st = bad_set("malformed");
    if (moe_failed(&st)) {
        moe_rpc_reflection_destroy(r);
        return st;
    }
    qsort(r->symbols, r->symbol_count, sizeof *r->symbols, by_name);
    *out = r;
    return moe_ok();
}

void moe_rpc_reflection_destroy(struct moe_rpc_reflection *r)
{
    if (r == NULL)
        return;
    for (size_t i = 0; i < r->symbol_count; i++)
        free(r->symbols[i].name);
    free(r);
}

/* ------------------------------------------------------------------ answers */

#define QUESTION(name) GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##name

typedef Grpc__Reflection__V1__ServerReflectionRequest request_t;
typedef Grpc__Reflection__V1__ServerReflectionResponse response_t;

static const struct file *find_file(const struct moe_rpc_reflection *r, struct span name)
{
    for (size_t i = 0; i < r->file_count; i++) {
        if (r->files[i].name.length == name.length &&
            memcmp(r->files[i].name.bytes, name.bytes, name.length) == 0)
            return &r->files[i];
    }
    return NULL;
}

static struct symbol *find_symbol(struct moe_rpc_reflection *r, const char *name)
{
    struct symbol key = {.name = (char *)(uintptr_t)name};
    return bsearch(&key, r->symbols, r->symbol_count, sizeof *r->symbols, by_name);
}

static const struct file *find_file_of_symbol(struct moe_rpc_reflection *r, const char *name)
{
    const struct symbol *s = find_symbol(r, name);
    return s == NULL ? NULL : &r->files[s->file];
}

void moe_rpc_reflection_add_method(struct moe_rpc_reflection *r, const char *path)
{
    char service[NAME_BYTES];
    int length = (int)strcspn(path + 1, "/");
    int n = snprintf(service, sizeof service, "%.*s", length, path + 1);
    struct symbol *s = n > 0 && n < NAME_BYTES ? find_symbol(r, service) : NULL;
    if (s != NULL)
        s->served = true;
}

/* `first` and all that it imports, directly or not; each once. */
static size_t collect(const struct moe_rpc_reflection *r, const struct file *first,
                      ProtobufCBinaryData out[FILES_MAX])
{
    bool seen[FILES_MAX] = {false};
    const struct file *reached[FILES_MAX];
    size_t count = 0;
    reached[count++] = first;
    seen[first - r->files] = true;
    for (size_t i = 0; i < count; i++) {
        out[i] = (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t)reached[i]->content.bytes,
                                       .len = reached[i]->content.length};
        for (size_t d = 0; d < reached[i]->dependency_count; d++) {
            const struct file *file = find_file(r, reached[i]->dependencies[d]);
            if (file == NULL || seen[file - r->files])
                continue;
            seen[file - r->files] = true;
            reached[count++] = file;
        }
    }
    return count;
}

/* Packs and sends. */
static void send(struct moe_rpc_call *call, request_t *request, response_t *response)
{
    response->valid_host = request->host;
    response->original_request = request;
    size_t length = grpc__reflection__v1__server_reflection_response__get_packed_size(response);
    uint8_t *bytes = malloc(length);
    if (bytes == NULL) {
        moe_rpc_fail(call, moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY,
                                     "out of memory for an answer"));
        return;
    }
    grpc__reflection__v1__server_reflection_response__pack(response, bytes);
    moe_rpc_send(call, &(struct moe_rpc_out){.head = bytes, .head_length = length});
    free(bytes);
}

static void send_error(struct moe_rpc_call *call, request_t *request, enum moe_code code,
                       const char *text)
{
    Grpc__Reflection__V1__ErrorResponse error = GRPC__REFLECTION__V1__ERROR_RESPONSE__INIT;
    response_t response = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    error.error_code = (int32_t)code;
    error.error_message = (char *)(uintptr_t)text;
    response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
    response.error_response = &error;
    send(call, request, &response);
}

static void send_file(struct moe_rpc_call *call, const struct moe_rpc_reflection *r,
                      request_t *request, const struct file *file)
{
    Grpc__Reflection__V1__FileDescriptorResponse files =
        GRPC__REFLECTION__V1__FILE_DESCRIPTOR_RESPONSE__INIT;
    response_t response = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    ProtobufCBinaryData contents[FILES_MAX];
    if (file == NULL) {
        send_error(call, request, MOE_NOT_FOUND, "there is no such file or symbol");
        return;
    }
    files.n_file_descriptor_proto = collect(r, file, contents);
    files.file_descriptor_proto = contents;
    response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
    response.file_descriptor_response = &files;
    send(call, request, &response);
}

static void send_services(struct moe_rpc_call *call, const struct moe_rpc_reflection *r,
                          request_t *request)
{
    Grpc__Reflection__V1__ListServiceResponse services =
        GRPC__REFLECTION__V1__LIST_SERVICE_RESPONSE__INIT;
    response_t response = GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__INIT;
    Grpc__Reflection__V1__ServiceResponse entries[FILES_MAX];
    Grpc__Reflection__V1__ServiceResponse *pointers[FILES_MAX];
    size_t count = 0;
    for (size_t i = 0; i < r->symbol_count && count < FILES_MAX; i++) {
        if (!r->symbols[i].served)
            continue;
        grpc__reflection__v1__service_response__init(&entries[count]);
        entries[count].name = r->symbols[i].name;
        pointers[count] = &entries[count];
        count++;
    }
    services.n_service = count;
    services.service = pointers;
    response.message_response_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    response.list_services_response = &services;
    send(call, request, &response);
}

static void answer(struct moe_rpc_call *call, struct moe_rpc_reflection *r, request_t *request)
{
    switch (request->message_request_case) {
    case QUESTION(LIST_SERVICES): send_services(call, r, request); break;
    case QUESTION(FILE_BY_FILENAME):
        send_file(call, r, request,
                  find_file(r, (struct span){(const uint8_t *)request->file_by_filename,
                                             strlen(request->file_by_filename)}));
        break;
    case QUESTION(FILE_CONTAINING_SYMBOL):
        send_file(call, r, request, find_file_of_symbol(r, request->file_containing_symbol));
        break;
    case QUESTION(FILE_CONTAINING_EXTENSION):
    case QUESTION(ALL_EXTENSION_NUMBERS_OF_TYPE):
        send_error(call, request, MOE_NOT_FOUND, "there are no extensions here");
        break;
    default: send_error(call, request, MOE_INVALID_ARGUMENT, "no question was asked"); break;
    }
}

static void on_message(struct moe_rpc_call *call, struct moe_rpc_msg *m, void *ctx)
{
    struct moe_rpc_arena arena;
    void *request;
    if (m == NULL) {
        moe_rpc_finish(call);
        return;
    }
    struct moe_status st = moe_rpc_msg_unpack(
        m, &grpc__reflection__v1__server_reflection_request__descriptor, &arena, &request);
    moe_rpc_msg_free(m);
    if (moe_failed(&st))
        moe_rpc_fail(call, st);
    else
        answer(call, ctx, request);
}

/* Reads the next request after the last answer has left. */
static void on_sent(struct moe_rpc_call *call, void *ctx)
{
    (void)ctx;
    moe_rpc_read_next(call);
}

void moe_rpc_reflection_methods(struct moe_rpc_reflection *r, struct moe_rpc_entry *out)
{
    static const char *const paths[MOE_RPC_REFLECTION_METHODS] = {
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"};
    for (size_t i = 0; i < MOE_RPC_REFLECTION_METHODS; i++)
        out[i] = (struct moe_rpc_entry){.method = {.path = paths[i],
                                                   .kind = MOE_RPC_STREAM,
                                                   .message = on_message,
                                                   .sent = on_sent,
                                                   .ctx = r},
                                        .built_in = true,
                                        .endless = true};
}
