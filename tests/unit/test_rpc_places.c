/* SPDX-License-Identifier: Apache-2.0 */
/* Who may open how many streams of a server: equal shares for owners, and the one furthest above
 * gives way. An owner is an identity with all its connections, or one connection without a name. */
#include "support/check.h"
#include "support/random.h"
#include "uploads/upload.h"

#include <stdio.h>

enum { CONNECTIONS_MAX = 600, OWNERS_MAX = 620, EACH = 356 };

/* What the test knows about a connection. */
struct connection {
    struct moe_rpc_uploads *uploads; /* NULL: none */
    unsigned owner;                  /* as index of `owned` */
    uint32_t next, first;            /* stream to open; the oldest open one */
    bool ended;                      /* by the budget */
};

static struct moe_rpc_budget budget;
static struct connection connections[CONNECTIONS_MAX];
static unsigned owned[OWNERS_MAX]; /* open streams of each owner */
static unsigned members[OWNERS_MAX], owners, ends, wrong;

static unsigned open_of(const struct connection *c)
{
    return c->ended ? 0 : (c->next - c->first) / 2;
}

/* Only the owner with the most loses a connection, and only above its share. This runs under the
 * budget's lock, so the assertion comes later. */
static void end(void *connection)
{
    struct connection *c = connection;
    const unsigned has = owned[c->owner];
    wrong += c->ended || open_of(c) == 0 || (uint64_t)has * owners < MOE_RPC_STREAMS_MAX;
    for (unsigned i = 0; i < OWNERS_MAX; i++)
        wrong += owned[i] > has;
    owned[c->owner] -= open_of(c);
    c->ended = true;
    ends++;
}

/* Owners below `named` are identities. */
static void connect_one(struct connection *c, unsigned owner, unsigned named)
{
    struct moe_rpc_identity who = {.link = MOE_RPC_LINK_TLS};
    *c = (struct connection){.owner = owner, .next = 1, .first = 1};
    if (owner < named)
        snprintf(who.name, sizeof who.name, "spiffe://test/%u", owner);
    owners += members[owner]++ == 0;
    assert_ok(moe_rpc_uploads_open(&budget, &who, c, &c->uploads));
}

static void disconnect(struct connection *c)
{
    owned[c->owner] -= open_of(c);
    owners -= --members[c->owner] == 0;
    moe_rpc_uploads_close(c->uploads);
    moe_rpc_uploads_free(c->uploads);
    c->uploads = NULL;
}

/* False if the stream is refused: only for those who have their share. */
static bool open_stream(struct connection *c)
{
    uint8_t field[MOE_RPC_UPLOAD_FIELD_BYTES];
    const bool admitted = moe_rpc_uploads_admit(c->uploads, EACH);
    assert_int_equal(wrong, 0);
    if (!admitted) {
        assert_true(c->ended || open_of(c) >= EACH ||
                    (uint64_t)(owned[c->owner] + 1) * owners > MOE_RPC_STREAMS_MAX);
        return false;
    }
    assert_false(c->ended);
    assert_true(moe_rpc_upload_begin(c->uploads, c->next, field) > 0);
    c->next += 2;
    owned[c->owner]++;
    return true;
}

static void close_stream(struct connection *c)
{
    assert_true(open_of(c) > 0);
    moe_rpc_upload_end(c->uploads, c->first);
    c->first += 2;
    owned[c->owner]--;
}

static int setup(void **unused)
{
    static const struct moe_rpc_waiters waiters = {.end = end};
    (void)unused;
    ends = wrong = 0;
    assert_ok(moe_rpc_upload_prepare());
    moe_rpc_budget_init(&budget, 0, 16, &waiters);
    return 0;
}

static int teardown(void **unused)
{
    (void)unused;
    for (unsigned i = 0; i < CONNECTIONS_MAX; i++)
        if (connections[i].uploads != NULL)
            disconnect(&connections[i]);
    assert_int_equal(moe_rpc_budget_use(&budget).open, 0);
    assert_int_equal(moe_rpc_budget_use(&budget).connections, 0);
    assert_int_equal(owners, 0);
    moe_rpc_budget_destroy(&budget);
    return 0;
}

/* Opens what is admitted, up to `count`. */
static unsigned open_many(struct connection *c, unsigned count)
{
    unsigned opened = 0;
    while (opened < count && open_stream(c))
        opened++;
    return opened;
}

static void an_owner_alone_may_have_all_streams(void **unused)
{
    unsigned total = 0;
    (void)unused;
    for (unsigned i = 0; i < 60; i++) {
        connect_one(&connections[i], 0, 1);
        total += open_many(&connections[i], EACH);
    }
    assert_int_equal(total, MOE_RPC_STREAMS_MAX);
    assert_int_equal(ends, 0);
}

static void the_largest_connection_gives_way(void **unused)
{
    enum { SILENT = 50 };
    (void)unused;
    for (unsigned i = 0; i < SILENT; i++) {
        connect_one(&connections[i], i, 0);
        open_many(&connections[i], i == 7 ? EACH : 330);
    }
    assert_int_equal(ends, 1);
    assert_true(connections[7].ended);
    assert_false(open_stream(&connections[7]));
    connect_one(&connections[SILENT], SILENT, 0);
    assert_int_equal(open_many(&connections[SILENT], 300), 300);
    assert_in_range(ends, 1, 2);
    assert_int_equal(moe_rpc_budget_use(&budget).open,
                     SILENT * 330 + 300 - 330 * ends); /* EACH was one of them, 330 each others */
}

static void an_identity_counts_with_all_its_connections(void **unused)
{
    enum { OF_ONE = 200, OTHERS = 20 };
    (void)unused;
    for (unsigned i = 0; i < OTHERS; i++) {
        connect_one(&connections[i], 1 + i, 0);
        assert_int_equal(open_many(&connections[i], 200), 200);
    }
    for (unsigned i = OTHERS; i < OTHERS + OF_ONE; i++) {
        connect_one(&connections[i], 0, 1);
        open_many(&connections[i], 80);
    }
    assert_int_equal(ends, 0); /* one identity does not displace those with fewer */
    for (unsigned i = 0; i < OTHERS; i++)
        assert_int_equal(open_many(&connections[i], 100), 100);
    for (unsigned i = 0; i < OTHERS; i++)
        assert_false(connections[i].ended);
    assert_in_range(ends, OTHERS * 100 / 80 - 1, OTHERS * 100 / 80 + 1);
}

/* Silent connections hold all streams; the light one has 30 calls at a time. */
static void simulated_silent_connections_leave_a_light_one_its_share(void **unused)
{
    enum { SILENT = 400, STEPS = 200000, LIGHT = 30 };
    struct connection *light = &connections[SILENT];
    unsigned again = 0;
    (void)unused;
    for (unsigned i = 0; i < SILENT; i++)
        connect_one(&connections[i], i, 0);
    connect_one(light, SILENT, 0);
    for (unsigned step = 0; step < STEPS; step++) {
        struct connection *c = &connections[random_below(SILENT)];
        if (c->ended || !open_stream(c)) { /* it comes back at once */
            unsigned owner = c->owner;
            disconnect(c);
            connect_one(c, owner, 0);
            again++;
        }
        while (open_of(light) > 0 && random_below(4) == 0)
            close_stream(light);
        if (open_of(light) < LIGHT)
            assert_true(open_stream(light));
        assert_false(light->ended);
    }
    print_message("  %u silent connections came back; %u streams open\n", again,
                  moe_rpc_budget_use(&budget).open);
    assert_true(ends > 0);
}

/* Identities and strangers at random; `end` and `open_stream` check every decision. */
static void simulated_owners_keep_their_shares(void **unused)
{
    enum { STEPS = 100000, NAMED = 12 };
    unsigned refused = 0;
    (void)unused;
    for (unsigned step = 0; step < STEPS; step++) {
        struct connection *c = &connections[random_below(CONNECTIONS_MAX)];
        const unsigned what = random_below(1000);
        if (c->uploads == NULL) {
            unsigned i = (unsigned)(c - connections);
            connect_one(c, i % 3 == 0 ? i / 3 % NAMED : NAMED + i, NAMED);
        }
        if (what < 3 || c->ended)
            disconnect(c);
        else if (what < 150 && open_of(c) > 0)
            close_stream(c);
        else
            refused += open_many(c, 1 + random_below(60)) == 0;
        assert_true(moe_rpc_budget_use(&budget).open <=
                    MOE_RPC_STREAMS_MAX + owners * MOE_RPC_STREAMS_LEAST);
    }
    print_message("  %u connections gave way, %u were refused\n", ends, refused);
    assert_true(ends > 100);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    seed_random();
    const struct CMUnitTest tests[] = {
        CASE(an_owner_alone_may_have_all_streams),
        CASE(the_largest_connection_gives_way),
        CASE(an_identity_counts_with_all_its_connections),
        CASE(simulated_silent_connections_leave_a_light_one_its_share),
        CASE(simulated_owners_keep_their_shares),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
