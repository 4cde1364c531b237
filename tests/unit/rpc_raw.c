/* SPDX-License-Identifier: Apache-2.0 */
#include "rpc_raw.h"

#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>

static void write_all(int fd, const void *bytes, size_t length)
{
    for (size_t at = 0; at < length;) {
        ssize_t n = send(fd, (const char *)bytes + at, length - at, MSG_NOSIGNAL);
        assert_true(n > 0);
        at += (size_t)n;
    }
}

void raw_frame(int fd, uint8_t type, uint8_t flags, uint32_t stream, const void *bytes,
               size_t length)
{
    const uint8_t head[9] = {
        (uint8_t)(length >> 16), (uint8_t)(length >> 8), (uint8_t)length, type, flags, 0, 0,
        (uint8_t)(stream >> 8),  (uint8_t)stream};
    write_all(fd, head, sizeof head);
    write_all(fd, bytes, length);
}

int raw_connect(const struct fixture *f)
{
    static const char begin[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons(moe_rpc_server_port(f->server)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof at), 0);
    write_all(fd, begin, sizeof begin - 1);
    raw_frame(fd, 4, 0, 0, "", 0); /* SETTINGS */
    return fd;
}

void raw_headers(int fd, uint32_t stream, const char *path)
{
    static const char rest[] = "\x01\x09localhost\x00\x02te\x08trailers\x00\x0c"
                               "content-type\x10"
                               "application/grpc";
    uint8_t headers[256] = {0x83, 0x86, 0x04, (uint8_t)strlen(path)};
    memcpy(headers + 4, path, strlen(path));
    memcpy(headers + 4 + strlen(path), rest, sizeof rest - 1);
    raw_frame(fd, RAW_HEADERS, RAW_END_HEADERS, stream, headers,
              4 + strlen(path) + sizeof rest - 1);
}

void raw_call(int fd, uint32_t stream, const char *path, uint32_t length, size_t sent)
{
    enum { PART = 16384 };
    uint8_t data[PART] = {0, (uint8_t)(length >> 24), (uint8_t)(length >> 16),
                          (uint8_t)(length >> 8), (uint8_t)length};
    raw_headers(fd, stream, path);
    for (sent += 5; sent > 0;) {
        size_t some = sent < PART ? sent : PART;
        raw_frame(fd, RAW_DATA, 0, stream, data, some);
        memset(data, 0, 5);
        sent -= some;
    }
}
