/* SPDX-License-Identifier: Apache-2.0 */
#include "membership_fixture.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct moe_membership *m;
struct moe_membership_saved disk;
uint64_t now;
/* Outputs since the last look. */
size_t prepares, commits, aborts, drains, closes, assigns, saves, answers;
uint64_t last_epoch, closed_stream, last_stream;
struct moe_status closed_with;
bool exited, disk_full;
enum moe_log_level ended_level;
bool trains, trains_with_copies, answered_keep;
uint32_t replicas;
size_t heartbeat_answers, reads;
uint64_t answered_released, read_order[MOE_PLACEMENT_SLOTS_MAX];
uint64_t answered_sequence;
uint32_t answered_oldest_ms;

uint32_t domain;
uint64_t last_session, registered_session;
uint32_t registered_tokens;
static uint32_t slot_of[1000];                     /* by stream, of its last PREPARE */
static uint64_t order_of[MOE_PLACEMENT_SLOTS_MAX]; /* of the last ASSIGN to each slot */

/* As Ready.together. */
static uint64_t together_with(uint32_t slot)
{
    return domain == 0 ? 0 : ((UINT64_C(1) << domain) - 1) << slot / domain * domain;
}

void carry_out(void)
{
    struct moe_membership_action a;
    struct moe_status st = moe_ok();
    while (moe_membership_next_action(m, &a)) {
        switch (a.kind) {
        case MOE_MEMBERSHIP_SAVE:
            saves++;
            if (disk_full)
                st = moe_error(MOE_UNAVAILABLE, MOE_REASON_IO, "no space left");
            else
                disk = *moe_membership_to_save(m);
            moe_membership_on_saved(m, now, a.sequence, &st);
            break;
        case MOE_MEMBERSHIP_SEND:
            prepares += a.message == MOE_MEMBERSHIP_PREPARE;
            commits += a.message == MOE_MEMBERSHIP_COMMIT;
            aborts += a.message == MOE_MEMBERSHIP_ABORT;
            drains += a.message == MOE_MEMBERSHIP_DRAIN;
            assigns += a.message == MOE_MEMBERSHIP_ASSIGN;
            if (a.message == MOE_MEMBERSHIP_ASSIGN)
                order_of[a.slot] = a.order;
            answers += a.message == MOE_MEMBERSHIP_TRYING_AGAIN;
            if (a.message == MOE_MEMBERSHIP_HEARTBEAT_ANSWER) {
                heartbeat_answers++;
                answered_sequence = a.sequence;
                answered_oldest_ms = a.oldest_ms;
                answered_keep = a.keep;
                answered_released = a.released_calls;
            }
            if (a.message == MOE_MEMBERSHIP_READ_CHECKPOINT) {
                reads++;
                read_order[a.slot] = a.order;
            }
            if (a.message == MOE_MEMBERSHIP_PREPARE) {
                last_epoch = a.epoch;
                last_session = a.session_epoch;
                slot_of[a.stream % 1000] = a.slot;
            }
            break;
        case MOE_MEMBERSHIP_CLOSE:
            closes++;
            closed_stream = a.stream;
            closed_with = a.status;
            break;
        case MOE_MEMBERSHIP_LOG:
            print_message("    %s\n", a.status.text);
            if (a.event == MOE_EVENT_ENDED)
                ended_level = a.level;
            break;
        case MOE_MEMBERSHIP_EXIT: exited = true; break;
        }
    }
}

void forget(void)
{
    prepares = commits = aborts = drains = closes = assigns = saves = answers = 0;
    heartbeat_answers = reads = 0;
}

void create_for(uint32_t slots)
{
    struct moe_membership_config config = {.slots = slots,
                                           .replicas = replicas,
                                           .group_id = 0xabcdef,
                                           .lease_ns = LEASE_MS * MOE_NS_PER_MS,
                                           .form_ns = 500 * MOE_NS_PER_MS,
                                           .read_ns = READ_MS * MOE_NS_PER_MS,
                                           .shutdown_ns = 2000 * MOE_NS_PER_MS,
                                           .backoff_ns = 100 * MOE_NS_PER_MS,
                                           .backoff_max_ns = 300 * MOE_NS_PER_MS,
                                           .attempts_max = ATTEMPTS,
                                           .version = "1.2.0"};
    struct moe_status st = moe_membership_create(&config, &disk, now, &m);
    assert_int_equal(st.code, MOE_OK);
    carry_out();
    forget();
}

int setup(void **unused)
{
    (void)unused;
    memset(&disk, 0, sizeof disk);
    now = MOE_NS_PER_S;
    last_stream = 0;
    exited = disk_full = trains = trains_with_copies = false;
    domain = 0;
    registered_session = 0;
    registered_tokens = 64;
    replicas = 1;
    create_for(SLOTS);
    return 0;
}

int teardown(void **unused)
{
    (void)unused;
    moe_membership_destroy(m);
    return 0;
}

uint32_t experts = 6;

const char *given_endpoint, *given_control;

/* Worker `id`'s process `incarnation` registers on a new stream under this identity, with a slot
 * token of bytes `token`; returns the stream's number. */
uint64_t join_as(uint32_t id, uint64_t incarnation, const char *identity, int token)
{
    char name[16], endpoint[32];
    uint8_t slot_token[MOE_MEMBERSHIP_TOKEN_BYTES];
    memset(slot_token, token, sizeof slot_token);
    snprintf(name, sizeof name, "w%u", id);
    snprintf(endpoint, sizeof endpoint, "127.0.0.1:%u", 1 + id);
    struct moe_membership_layer layer = {.layer = 0, .hidden = 8, .experts = experts, .top_k = 2};
    struct moe_membership_register r = {
        .worker_id = name,
        .endpoint = given_endpoint != NULL ? given_endpoint : endpoint,
        .control_endpoint = given_control != NULL ? given_control : "127.0.0.1:2",
        .backend = "cpu",
        .model = "Mod\xc3\xa8le 7 B",
        .fingerprint = "f00d",
        .family = "mixtral",
        .version = "1.2.9",
        .incarnation = incarnation,
        .identity = identity,
        .slot_token = slot_token,
        .max_tokens_per_step = 64,
        .trains = trains,
        .trains_with_copies = trains_with_copies,
        .session = {registered_session, together_with(id), registered_tokens},
        .layers = &layer,
        .layer_count = 1};
    moe_membership_on_register(m, now, ++last_stream, &r);
    carry_out();
    return last_stream;
}

uint64_t join(uint32_t id, uint64_t incarnation)
{
    return join_as(id, incarnation, "uid:7", (int)incarnation);
}

/* The same, after the old process's stream has ended. */
uint64_t replace(uint64_t old_stream, uint32_t id, uint64_t incarnation)
{
    moe_membership_on_stream_closed(m, now, old_stream);
    carry_out();
    return join(id, incarnation);
}

void loaded(uint64_t stream)
{
    struct moe_status st = moe_ok();
    uint32_t slot;
    assert_true(moe_membership_slot_of(m, stream, &slot));
    moe_membership_on_loaded(m, now, stream, moe_placement_version(moe_membership_placement(m)),
                             order_of[slot], &st);
    carry_out();
}

void heartbeat_saved(uint64_t stream, uint64_t epoch, uint64_t calls)
{
    struct moe_membership_heartbeat h = {
        .epoch = epoch, .training_saved = {.checkpoint = "c", .calls = calls, .record = calls}};
    moe_membership_on_heartbeat(m, now, stream, &h);
    carry_out();
}

void heartbeat(uint64_t stream, uint64_t epoch)
{
    heartbeat_saved(stream, epoch, 0);
}

void checkpoint_read_as(uint64_t stream, uint32_t slot, struct moe_status st)
{
    moe_membership_on_checkpoint_read(m, now, stream, read_order[slot], &st);
    carry_out();
}

void checkpoint_read(uint64_t stream, uint32_t slot, const char *error)
{
    checkpoint_read_as(stream, slot,
                       error != NULL ? moe_error(MOE_DATA_LOSS, MOE_REASON_MALFORMED, "%s", error)
                                     : moe_ok());
}

void ready(uint64_t stream, const char *error)
{
    struct moe_status st =
        error != NULL ? moe_error(MOE_INTERNAL, MOE_REASON_NONE, "%s", error) : moe_ok();
    moe_membership_on_ready(m, now, stream, last_epoch, together_with(slot_of[stream % 1000]), &st);
    carry_out();
}

/* Time passes in small steps, with heartbeats of the streams given. */
void pass(uint64_t ms, uint64_t epoch, const uint64_t *streams, size_t count)
{
    for (uint64_t t = 0; t < ms; t += 50) {
        now += 50 * MOE_NS_PER_MS;
        for (size_t i = 0; i < count; i++)
            heartbeat(streams[i], epoch);
        moe_membership_on_tick(m, now);
        carry_out();
    }
}

struct moe_membership_group group(void)
{
    static struct moe_membership_group g;
    moe_membership_group(m, &g);
    return g;
}

void expect_state(enum moe_group_state want)
{
    struct moe_membership_group g = group();
    print_message("  state %d, epoch %" PRIu64 ": %s\n", g.state, g.epoch, g.reason);
    assert_int_equal(g.state, want);
}

void load_all(uint64_t s[SLOTS])
{
    for (uint32_t i = 0; i < SLOTS; i++)
        s[i] = join(i, 10 + i);
    for (uint32_t i = 0; i < SLOTS; i++)
        loaded(s[i]);
}

void serve(uint64_t s[SLOTS])
{
    load_all(s);
    for (uint32_t i = 0; i < SLOTS; i++)
        ready(s[i], NULL);
    expect_state(MOE_GROUP_SERVING);
    forget();
}

void create_with_copies(void)
{
    moe_membership_destroy(m);
    replicas = 2;
    create_for(SLOTS);
}

void lose_stream(uint64_t stream)
{
    moe_membership_on_stream_closed(m, now, stream);
    carry_out();
}

void miss(uint64_t stream, uint64_t epoch, uint64_t slots)
{
    moe_membership_on_peer_lost(m, now, stream, epoch, slots);
    carry_out();
}

void lose(const uint64_t s[SLOTS], uint32_t slot, uint64_t epoch)
{
    lose_stream(s[slot]);
    miss(s[0], epoch, UINT64_C(1) << slot);
}
