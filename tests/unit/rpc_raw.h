/* SPDX-License-Identifier: Apache-2.0 */
/* Clients that misbehave: they write frames of HTTP/2. */
#ifndef MOE_TEST_RPC_RAW_H
#define MOE_TEST_RPC_RAW_H

#include "rpc_fixture.h"

enum { RAW_DATA, RAW_HEADERS, RAW_END_HEADERS = 4 };

/* A connection that has sent its preface and SETTINGS. The caller closes it. */
int raw_connect(const struct fixture *f);
void raw_frame(int fd, uint8_t type, uint8_t flags, uint32_t stream, const void *bytes,
               size_t length);
/* Opens a call. */
void raw_headers(int fd, uint32_t stream, const char *path);
/* A call that announces a message of `length` bytes and sends `sent` of them. */
void raw_call(int fd, uint32_t stream, const char *path, uint32_t length, size_t sent);

#endif
