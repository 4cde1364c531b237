/* SPDX-License-Identifier: Apache-2.0 */
/* Protobuf messages as JSON, by the rules of proto3 JSON: lowerCamelCase names, 64-bit integers as
 * strings, every field present. One exception, for readability: enum values lose the prefix with
 * the enum's name (GROUP_STATE_SERVING is "SERVING"). */
#ifndef MOECTL_PROTO_JSON_H
#define MOECTL_PROTO_JSON_H

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>

/* Adds the fields of `m` to `object`; false when out of memory. `bytes` fields are left out. */
bool moectl_proto_to_json(const ProtobufCMessage *m, json_t *object);

/* Prints a document of this kind with the fields of `m`; the exit code. */
int moectl_print_message(const char *kind, const ProtobufCMessage *m);
/* `m` as a JSON value; NULL when out of memory. */
json_t *moectl_proto_json(const ProtobufCMessage *m);

/* The short name of an enum value, "?" for one that is not in the enum. */
const char *moectl_enum_name(const ProtobufCEnumDescriptor *type, int value);

#endif
