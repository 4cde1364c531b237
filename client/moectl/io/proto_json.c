/* SPDX-License-Identifier: Apache-2.0 */
/* Walks any message by its descriptor. */
#include "moectl/io/proto_json.h"

#include "moectl/io/cli.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { NAME_MAX_LENGTH = 64 };

static void camel_case(const char *name, char out[NAME_MAX_LENGTH])
{
    size_t n = 0;
    bool upper = false;
    for (; *name != '\0' && n < NAME_MAX_LENGTH - 1; name++) {
        if (*name == '_') {
            upper = true;
            continue;
        }
        out[n++] = upper ? (char)toupper((unsigned char)*name) : *name;
        upper = false;
    }
    out[n] = '\0';
}

/* Length of the prefix of an enum's values, its name in capitals: "GROUP_STATE_". */
static size_t prefix_length(const ProtobufCEnumDescriptor *type)
{
    size_t n = 0;
    for (const char *p = type->short_name; *p != '\0'; p++)
        n += p != type->short_name && isupper((unsigned char)*p) ? 2 : 1;
    return n + 1;
}

const char *moectl_enum_name(const ProtobufCEnumDescriptor *type, int value)
{
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(type, value);
    size_t prefix = prefix_length(type);
    return v == NULL ? "?" : strlen(v->name) > prefix ? v->name + prefix : v->name;
}

static json_t *from_signed(int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, value);
    return json_string(text);
}

static json_t *from_unsigned(uint64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, value);
    return json_string(text);
}

static json_t *from_text(const char *text)
{
    json_t *j = json_string(text != NULL ? text : "");
    return j != NULL ? j : json_string("(not UTF-8)");
}

json_t *moectl_proto_json(const ProtobufCMessage *m)
{
    json_t *object = m != NULL ? json_object() : json_null();
    if (m != NULL && object != NULL && !moectl_proto_to_json(m, object)) {
        json_decref(object);
        return NULL;
    }
    return object;
}

/* One value at `at`. */
static json_t *from_value(const ProtobufCFieldDescriptor *field, const void *at)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32: return json_integer(*(const int32_t *)at);
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32: return json_integer(*(const uint32_t *)at);
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64: return from_signed(*(const int64_t *)at);
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64: return from_unsigned(*(const uint64_t *)at);
    case PROTOBUF_C_TYPE_FLOAT: return json_real((double)*(const float *)at);
    case PROTOBUF_C_TYPE_DOUBLE: return json_real(*(const double *)at);
    case PROTOBUF_C_TYPE_BOOL: return json_boolean(*(const protobuf_c_boolean *)at);
    case PROTOBUF_C_TYPE_ENUM:
        return json_string(moectl_enum_name(field->descriptor, *(const int *)at));
    case PROTOBUF_C_TYPE_STRING: return from_text(*(char *const *)at);
    case PROTOBUF_C_TYPE_MESSAGE: return moectl_proto_json(*(ProtobufCMessage *const *)at);
    case PROTOBUF_C_TYPE_BYTES: break;
    }
    return json_null();
}

static size_t value_size(const ProtobufCFieldDescriptor *field)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE: return 8;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE: return sizeof(void *);
    case PROTOBUF_C_TYPE_BOOL: return sizeof(protobuf_c_boolean);
    default: return 4;
    }
}

static json_t *from_repeated(const ProtobufCFieldDescriptor *field, const ProtobufCMessage *m)
{
    size_t count = *(const size_t *)((const char *)m + field->quantifier_offset);
    const char *values = *(char *const *)((const char *)m + field->offset);
    json_t *array = json_array();
    for (size_t i = 0; i < count && array != NULL; i++) {
        if (json_array_append_new(array, from_value(field, values + i * value_size(field))) == 0)
            continue;
        json_decref(array);
        array = NULL;
    }
    return array;
}

bool moectl_proto_to_json(const ProtobufCMessage *m, json_t *object)
{
    for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &m->descriptor->fields[i];
        if (field->type == PROTOBUF_C_TYPE_BYTES)
            continue;
        char name[NAME_MAX_LENGTH];
        camel_case(field->name, name);
        json_t *value = field->label == PROTOBUF_C_LABEL_REPEATED
                            ? from_repeated(field, m)
                            : from_value(field, (const char *)m + field->offset);
        if (json_object_set_new(object, name, value) != 0)
            return false;
    }
    return true;
}

int moectl_print_message(const char *kind, const ProtobufCMessage *m)
{
    json_t *document = moectl_document(kind);
    if (document != NULL && !moectl_proto_to_json(m, document)) {
        json_decref(document);
        document = NULL;
    }
    return moectl_print(document);
}
