/* SPDX-License-Identifier: Apache-2.0 */
/* See shared_fixture.h. */
#include "shared_fixture.h"

#include "base/clock.h"
#include "base/wait.h"
#include "regions/memory.h"
#include "regions/packet.h"
#include "regions/wait.h"
#include "support/directory.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

struct service shared;
struct moe_progress *shared_progress;
static char directory[MOE_TEST_DIRECTORY_BYTES], path[MOE_TEST_DIRECTORY_BYTES + 16];

enum { WAIT_S = 10 };

int shared_open(void **state)
{
    (void)state;
    struct stat file;
    assert_true(moe_test_directory("regions", directory));
    (void)snprintf(path, sizeof path, "%s/socket", directory);
    const struct moe_progress_config progress = {.step_ns = MOE_NS_PER_S, .limit_ns = MOE_NS_PER_S};
    assert_ok(moe_progress_create(&progress, &shared_progress));
    service_open_shared(&shared, SHARED_BYTES, SHARED_IDENTITY_BYTES, path, shared_progress);
    assert_int_equal(stat(path, &file), 0);
    assert_int_equal(file.st_mode & 0777, 0600);
    return 0;
}

int shared_close(void **state)
{
    (void)state;
    shared_await_metric("moe_regions_clients", 0);
    shared_await_metric("moe_regions_bytes", 0);
    assert_serves(&shared);
    service_close(&shared);
    return shared_remove_directory();
}

int shared_remove_directory(void)
{
    moe_progress_destroy(shared_progress);
    assert_int_not_equal(access(path, F_OK), 0);
    return rmdir(directory);
}

void shared_pause_view(void)
{
    assert_ok(moe_service_set_view(shared.service, 0, NULL, 0));
    worker_stop_view(&shared.worker);
}

void shared_resume_view(void)
{
    service_start_view(&shared);
}

double shared_metric(const char *name)
{
    char *text, line[64];
    size_t length;
    assert_ok(moe_metrics_render(shared.metrics, &text, &length));
    (void)snprintf(line, sizeof line, "\n%s ", name);
    const char *at = strstr(text, line);
    assert_non_null(at);
    double value = strtod(at + strlen(line), NULL);
    free(text);
    return value;
}

void shared_await_metric(const char *name, double value)
{
    const uint64_t end = moe_clock_ns() + WAIT_S * MOE_NS_PER_S;
    while (shared_metric(name) != value) {
        if (moe_clock_ns() > end)
            fail_msg("%s is %g, not %g", name, shared_metric(name), value);
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    }
}

/* Calls a method with an empty request. `*message` lives as long as the returned reply. */
static struct moe_rpc_msg *ask_over(struct moe_rpc_channel *channel, const char *method,
                                    const ProtobufCMessageDescriptor *type,
                                    struct moe_rpc_arena *arena, void **message)
{
    const struct moe_rpc_call_options options = {
        .deadline_ns = moe_clock_ns() + WAIT_S * MOE_NS_PER_S, .wait_for_ready = true};
    const struct moe_rpc_out nothing = {0};
    struct moe_rpc_msg *reply;
    assert_ok(moe_rpc_call_wait(channel, method, &options, &nothing, &reply));
    assert_ok(moe_rpc_msg_unpack(reply, type, arena, message));
    return reply;
}

static struct moe_rpc_msg *ask(const char *method, const ProtobufCMessageDescriptor *type,
                               struct moe_rpc_arena *arena, void **message)
{
    return ask_over(shared.channel, method, type, arena, message);
}

bool shared_is_offered(void)
{
    struct moe_rpc_arena arena;
    void *message;
    bool found = false;
    struct moe_rpc_msg *reply =
        ask("/moe.v1.ExpertService/GetServerInfo", &moe__v1__get_server_info_response__descriptor,
            &arena, &message);
    const Moe__V1__GetServerInfoResponse *r = message;
    for (size_t i = 0; i < r->n_extensions; i++)
        found = found || strcmp(r->extensions[i], "regions") == 0;
    moe_rpc_msg_free(reply);
    return found;
}

static Moe__V1__RegionStatus status_of_region(const char *name)
{
    Moe__V1__RegionStatus found = MOE__V1__REGION_STATUS__REGION_STATUS_UNSPECIFIED;
    struct moe_rpc_arena arena;
    void *message;
    struct moe_rpc_msg *reply = ask("/moe.v1.ExpertService/ListRegions",
                                    &moe__v1__list_regions_response__descriptor, &arena, &message);
    const Moe__V1__ListRegionsResponse *r = message;
    for (size_t i = 0; i < r->n_regions; i++)
        if (strcmp(r->regions[i]->name, name) == 0)
            found = r->regions[i]->status;
    moe_rpc_msg_free(reply);
    return found;
}

void shared_await_status(const char *name, Moe__V1__RegionStatus status)
{
    const uint64_t end = moe_clock_ns() + WAIT_S * MOE_NS_PER_S;
    while (status_of_region(name) != status) {
        if (moe_clock_ns() > end)
            fail_msg("region %s has status %d, not %d", name, status_of_region(name), status);
        moe_sleep_until(moe_clock_ns() + MOE_NS_PER_MS);
    }
}

struct moe_client *shared_client(void)
{
    char endpoint[32];
    struct moe_client *c;
    (void)snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", moe_rpc_server_port(shared.server));
    const struct moe_client_config config = {.size = sizeof config, .endpoint = endpoint};
    assert_ok(moe_client_connect(&config, &c));
    return c;
}

/* -------------------------------------------------------------------- raw clients */

void raw_ticket_over(struct moe_rpc_channel *channel, uint8_t ticket[16])
{
    struct moe_rpc_arena arena;
    void *message;
    struct moe_rpc_msg *reply =
        ask_over(channel, "/moe.v1.ExpertService/OpenRegions",
                 &moe__v1__open_regions_response__descriptor, &arena, &message);
    const Moe__V1__OpenRegionsResponse *r = message;
    assert_string_equal(r->socket, path);
    assert_int_equal(r->ticket.len, 16);
    memcpy(ticket, r->ticket.data, 16);
    moe_rpc_msg_free(reply);
}

void raw_ticket(uint8_t ticket[16])
{
    raw_ticket_over(shared.channel, ticket);
}

void raw_connect(struct raw *r)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    memcpy(at.sun_path, path, strlen(path) + 1);
    *r = (struct raw){.socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
    assert_true(r->socket >= 0);
    assert_int_equal(connect(r->socket, (struct sockaddr *)&at, sizeof at), 0);
}

void raw_join(struct raw *r)
{
    uint8_t ticket[16];
    int descriptor;
    void *ring;
    raw_ticket(ticket);
    raw_connect(r);
    assert_ok(moe_region_memory_create(sizeof(struct moe_ring), &descriptor, &ring));
    moe_ring_caller_init(&r->caller, ring);
    assert_ok(raw_send_join(r, ticket, sizeof ticket, descriptor));
    close(descriptor);
}

void raw_leave(struct raw *r)
{
    close(r->socket);
    moe_region_memory_unmap(r->caller.ring, sizeof(struct moe_ring));
}

static struct moe_status status_of(const Moe__V1__Error *e)
{
    return e == NULL ? moe_ok()
                     : moe_error((enum moe_code)e->code, moe_reason_from_name(e->reason), "%s",
                                 e->message);
}

/* The reply to message `id`; others are passed over. */
static struct moe_status await_reply(struct raw *r, uint64_t id, uint32_t *number)
{
    uint8_t bytes[MOE_PACKET_BYTES];
    struct moe_rpc_arena arena;
    void *message;
    for (;;) {
        struct pollfd p = {.fd = r->socket, .events = POLLIN};
        size_t length;
        int descriptor;
        if (poll(&p, 1, WAIT_S * 1000) != 1)
            fail_msg("no reply");
        enum moe_packet got = moe_packet_receive(r->socket, bytes, &length, &descriptor);
        if (got == MOE_PACKET_END)
            return moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "the connection has ended");
        if (got != MOE_PACKET_MESSAGE)
            continue;
        assert_ok(
            moe_rpc_unpack(&moe__v1__regions_reply__descriptor, bytes, length, &arena, &message));
        const Moe__V1__RegionsReply *reply = message;
        if (reply->id != id)
            continue;
        if (number != NULL)
            *number = reply->number;
        return status_of(reply->error);
    }
}

struct moe_status raw_ask(struct raw *r, Moe__V1__RegionsRequest *q, int descriptor,
                          uint32_t *number)
{
    uint8_t bytes[1024];
    q->id = ++r->id;
    assert_true(moe__v1__regions_request__get_packed_size(q) <= sizeof bytes);
    size_t length = moe__v1__regions_request__pack(q, bytes);
    MOE_TRY(moe_packet_send(r->socket, bytes, length, descriptor));
    return await_reply(r, q->id, number);
}

struct moe_status raw_send_join(struct raw *r, const uint8_t *ticket, size_t length, int descriptor)
{
    Moe__V1__JoinRegions action = MOE__V1__JOIN_REGIONS__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    action.ticket = (ProtobufCBinaryData){.len = length, .data = (uint8_t *)(uintptr_t)ticket};
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_JOIN;
    q.join = &action;
    return raw_ask(r, &q, descriptor, NULL);
}

struct moe_status raw_add(struct raw *r, const char *name, int descriptor, uint32_t *number)
{
    Moe__V1__AddRegion action = MOE__V1__ADD_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    action.name = (char *)(uintptr_t)name;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_ADD;
    q.add = &action;
    return raw_ask(r, &q, descriptor, number);
}

struct moe_status raw_remove(struct raw *r, const char *name)
{
    Moe__V1__RemoveRegion action = MOE__V1__REMOVE_REGION__INIT;
    Moe__V1__RegionsRequest q = MOE__V1__REGIONS_REQUEST__INIT;
    action.name = (char *)(uintptr_t)name;
    q.action_case = MOE__V1__REGIONS_REQUEST__ACTION_REMOVE;
    q.remove = &action;
    return raw_ask(r, &q, -1, NULL);
}

void *raw_region(struct raw *r, const char *name, size_t bytes, uint32_t *number)
{
    int descriptor;
    void *data;
    assert_ok(moe_region_memory_create(bytes, &descriptor, &data));
    assert_ok(raw_add(r, name, descriptor, number));
    close(descriptor);
    return data;
}

bool raw_has_ended(struct raw *r)
{
    uint8_t bytes[MOE_PACKET_BYTES];
    for (;;) {
        struct pollfd p = {.fd = r->socket, .events = POLLIN};
        size_t length;
        int descriptor;
        if (poll(&p, 1, WAIT_S * 1000) != 1)
            return false;
        if (moe_packet_receive(r->socket, bytes, &length, &descriptor) == MOE_PACKET_END)
            return true;
    }
}

void raw_submit(struct raw *r, uint32_t entry, const struct moe_ring_request *q)
{
    assert_true(moe_ring_caller_is_free(&r->caller, entry));
    (void)moe_ring_caller_submit(&r->caller, entry, q);
    if (moe_ring_caller_must_wake(&r->caller))
        moe_packet_wake(r->socket);
}

struct moe_status raw_await(struct raw *r, uint32_t entry)
{
    enum moe_code code;
    struct moe_ring_details d;
    if (!moe_ring_wait(&r->caller, entry, 0, moe_clock_ns() + WAIT_S * MOE_NS_PER_S, &code))
        fail_msg("no completion");
    assert_true(moe_ring_caller_details(&r->caller, entry, &d));
    return code == MOE_OK ? moe_ok() : moe_error(code, (enum moe_reason)d.reason, "%s", d.text);
}

struct moe_status raw_forward(struct raw *r, const struct moe_ring_request *q)
{
    raw_submit(r, 0, q);
    return raw_await(r, 0);
}
