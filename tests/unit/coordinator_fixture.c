/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator_fixture.h"

#include "base/clock.h"
#include "support/check.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LIMIT_S = 20 };

char directory[] = "/tmp/moe-coordinator-XXXXXX";
struct moe_coordinator *coordinator;
static pthread_t coordinator_thread;
static struct moe_status coordinator_end;
struct moe_rpc_client *client;
struct moe_rpc_channel *channel;

uint64_t time_limit(void)
{
    return moe_clock_ns() + LIMIT_S * MOE_NS_PER_S;
}

/* ------------------------------------------------------------------ the coordinator */

static void *run_coordinator(void *unused)
{
    (void)unused;
    coordinator_end = moe_coordinator_run(coordinator);
    return NULL;
}

void start_coordinator(uint32_t slots, uint32_t lease_ms)
{
    struct moe_coordinator_config config = {.listen = "127.0.0.1:0",
                                            .slots = slots,
                                            .replicas = 1,
                                            .lease_ms = lease_ms,
                                            .form_timeout_ms = 10000,
                                            .state_dir = directory,
                                            .metrics_listen = "127.0.0.1:0"};
    assert_ok(moe_coordinator_create(&config, &coordinator));
    assert_int_equal(pthread_create(&coordinator_thread, NULL, run_coordinator, NULL), 0);
    char target[32];
    snprintf(target, sizeof target, "127.0.0.1:%u", moe_coordinator_port(coordinator));
    struct moe_rpc_channel_config to = {.target = target};
    assert_ok(moe_rpc_channel_open(client, &to, &channel));
}

void join_coordinator(enum moe_code want)
{
    pthread_join(coordinator_thread, NULL);
    assert_int_equal(coordinator_end.code, want);
    moe_coordinator_destroy(coordinator);
    coordinator = NULL;
    moe_rpc_channel_close(channel);
    channel = NULL;
}

void quit_coordinator(void)
{
    moe_coordinator_request_stop(coordinator);
    moe_coordinator_request_stop(coordinator);
    pthread_join(coordinator_thread, NULL);
    moe_coordinator_destroy(coordinator);
    coordinator = NULL;
    moe_rpc_channel_close(channel);
    channel = NULL;
}

/* Leaves the log as a crash at this moment would: a coordinator that stops shuts its group down,
 * and writes that too. */
void crash_coordinator(void)
{
    char path[80];
    uint8_t image[65536];
    snprintf(path, sizeof path, "%s/group.log", directory);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t length = fread(image, 1, sizeof image, f);
    fclose(f);
    quit_coordinator();
    f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(image, 1, length, f), length);
    assert_int_equal(fclose(f), 0);
}

int make_directory(void **unused)
{
    (void)unused;
    strcpy(directory + strlen(directory) - 6, "XXXXXX");
    if (mkdtemp(directory) == NULL)
        return -1;
    struct moe_status st = moe_rpc_client_create(&client);
    return st.code == MOE_OK ? 0 : -1;
}

int remove_directory(void **unused)
{
    (void)unused;
    moe_rpc_client_destroy(client);
    char path[80];
    snprintf(path, sizeof path, "%s/group.log", directory);
    (void)unlink(path);
    snprintf(path, sizeof path, "%s/model.digests", directory);
    (void)unlink(path);
    snprintf(path, sizeof path, "%s/lock", directory);
    (void)unlink(path);
    return rmdir(directory);
}

/* ------------------------------------------------------------------ admin calls */

/* The answer's bytes; the call's end in `*st`. */
size_t call_admin(const char *path, const ProtobufCMessage *request, uint8_t *bytes,
                  size_t capacity, struct moe_status *st)
{
    uint8_t out[512];
    size_t length = protobuf_c_message_pack(request, out);
    struct moe_rpc_call_options options = {.deadline_ns = time_limit(), .wait_for_ready = true};
    struct moe_rpc_msg *reply = NULL;
    *st = moe_rpc_call_wait(channel, path, &options,
                            &(struct moe_rpc_out){.head = out, .head_length = length}, &reply);
    if (st->code != MOE_OK)
        return 0;
    assert_ok(moe_rpc_msg_flatten(reply, bytes, capacity, &length));
    moe_rpc_msg_free(reply);
    return length;
}

Moe__V1__GetStatusResponse *get_status(void)
{
    static uint8_t bytes[65536];
    struct moe_status st;
    Moe__V1__GetStatusRequest request = MOE__V1__GET_STATUS_REQUEST__INIT;
    size_t length =
        call_admin("/moe.v1.AdminService/GetStatus", &request.base, bytes, sizeof bytes, &st);
    assert_ok(st);
    Moe__V1__GetStatusResponse *r = moe__v1__get_status_response__unpack(NULL, length, bytes);
    assert_non_null(r);
    return r;
}

void wait_for_state(Moe__V1__GroupState want)
{
    uint64_t until = time_limit();
    for (;;) {
        Moe__V1__GetStatusResponse *r = get_status();
        bool there = r->state == want;
        if (there || moe_clock_ns() > until)
            print_message("  state %d: epoch %" PRIu64 ", %s\n", r->state, r->epoch, r->reason);
        moe__v1__get_status_response__free_unpacked(r, NULL);
        if (there)
            return;
        assert_true(moe_clock_ns() < until);
        usleep(10000);
    }
}

struct moe_status drain(uint32_t slot, const char *reason)
{
    uint8_t bytes[64];
    struct moe_status st;
    Moe__V1__DrainWorkerRequest request = MOE__V1__DRAIN_WORKER_REQUEST__INIT;
    request.slot = slot;
    request.reason = (char *)(uintptr_t)reason;
    call_admin("/moe.v1.AdminService/DrainWorker", &request.base, bytes, sizeof bytes, &st);
    return st;
}

void check_metrics(const char *want)
{
    char text[16384] = "";
    size_t length = 0;
    ssize_t n;
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons(moe_coordinator_metrics_port(coordinator)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    static const char request[] = "GET /metrics HTTP/1.0\r\n\r\n";
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    assert_int_equal(write(fd, request, sizeof request - 1), sizeof request - 1);
    while ((n = read(fd, text + length, sizeof text - 1 - length)) > 0)
        length += (size_t)n;
    close(fd);
    text[length] = '\0';
    if (strstr(text, want) == NULL)
        fail_msg("no '%s' in the metrics:\n%s", want, text);
}
