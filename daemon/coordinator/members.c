/* SPDX-License-Identifier: Apache-2.0 */
/* Members of slots: registration, fencing, agreement on the model. Never forms epochs; ends one
 * when its member is lost. */
#include "base/guard.h"
#include "base/secret.h"
#include "coordinator/membership_state.h"
#include "daemon/endpoint.h"
#include "daemon/name.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { READ_FAILURES_MAX = 3 };

/* ------------------------------------------------------------------ slots */

bool moe_membership__find_stream(const struct moe_membership *m, uint64_t stream, uint32_t *slot)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if (m->members[s].state == SLOT_TAKEN && m->members[s].stream == stream) {
            *slot = s;
            return true;
        }
    }
    return false;
}

/* The process may live and hold its lease until then. One that has drained has no call that could
 * change anything; once all have, the view is settled. */
static void note_lost_lease(struct moe_membership *m, const struct member *member)
{
    bool drained = false, others = false;
    for (uint32_t p = 0; p < SLOTS_MAX; p++) {
        bool itself = m->past.incarnations[p] == member->incarnation;
        uint64_t end_ns = member->last_message_ns + m->config.lease_ns;
        drained = drained || (itself && member->leaving);
        if (itself && !member->leaving)
            m->past.lease_end_ns = moe_earlier(m->past.lease_end_ns, end_ns);
        if (itself && member->leaving)
            m->past.incarnations[p] = 0;
        others = others || m->past.incarnations[p] != 0;
    }
    m->past.settled = m->past.settled || (drained && !others);
}

void moe_membership__lose(struct moe_membership *m, uint32_t slot, enum moe_membership_cause cause,
                          const char *what, struct moe_status last_status)
{
    struct member *member = &m->members[slot];
    char why[MOE_MEMBERSHIP_REASON_BYTES];
    snprintf(why, sizeof why, "slot %u %s", slot, what);
    if (member->stream != 0)
        moe_membership__close(m, member->stream, last_status);
    member->state = SLOT_LEFT;
    member->stream = 0;
    bool regular = cause == MOE_CAUSE_LEFT || cause == MOE_CAUSE_SCALED;
    bool planned = (m->removed >> slot & 1) != 0 && member->leaving;
    moe_membership__log(m, MOE_LOG_WARN, regular ? MOE_EVENT_LEFT : MOE_EVENT_LOST, slot, "%s (%s)",
                        why, member->worker_id);
    bool member_of_epoch = moe_membership__takes_part(m, slot);
    if (member_of_epoch || m->view_epoch == 0)
        moe_membership_copy_text(m->trouble, sizeof m->trouble, why);
    moe_membership__note_lost_place(m, slot);
    m->shrinks = true;
    m->planned = planned;
    if (!MOE_GUARD(LOSS_ENDS_THE_EPOCH, !member_of_epoch))
        moe_membership__end_epoch(m, cause, why);
    m->shrinks = m->planned = false;
    note_lost_lease(m, member);
    member->error =
        regular ? moe_ok() : moe_error(MOE_UNAVAILABLE, MOE_REASON_PEER_LOST, "%s", what);
}

/* Searches the history from its end. False when it does not contain the worker. */
static bool find_latest(const struct moe_membership *m, const char *worker_id,
                        uint64_t *incarnation)
{
    size_t kept = m->history_count < HISTORY_MAX ? m->history_count : HISTORY_MAX;
    for (size_t age = 1; age <= kept; age++) {
        size_t at = (m->history_count - age) % HISTORY_MAX;
        if (strcmp(m->history[at].worker_id, worker_id) == 0) {
            *incarnation = m->history[at].incarnation;
            return true;
        }
    }
    return false;
}

void moe_membership__remember(struct moe_membership *m, const struct member *member)
{
    uint64_t latest;
    if (find_latest(m, member->worker_id, &latest) && latest == member->incarnation)
        return;
    size_t at = m->history_count++ % HISTORY_MAX;
    memcpy(m->history[at].worker_id, member->worker_id, sizeof m->history[at].worker_id);
    m->history[at].incarnation = member->incarnation;
}

static struct moe_status stale_process(void)
{
    return moe_error(MOE_ABORTED, MOE_REASON_STALE_EPOCH,
                     "a newer process of this worker has registered");
}

/* True for a process that had a slot before a later process of the same worker had one. */
static bool is_fenced(const struct moe_membership *m, const struct moe_membership_register *r)
{
    uint64_t latest;
    if (!find_latest(m, r->worker_id, &latest) || latest == r->incarnation)
        return false;
    for (size_t i = 0; i < HISTORY_MAX; i++)
        if (m->history[i].incarnation == r->incarnation &&
            strcmp(m->history[i].worker_id, r->worker_id) == 0)
            return true;
    return false;
}

/* Slots with experts come first; a worker in another one is a spare, which does not train. Then the
 * order is: the slot that the worker left, the wanted one, one that was never taken, any free one.
 */
static bool pick_slot(const struct moe_membership *m, const struct moe_membership_register *r,
                      uint32_t *slot)
{
    uint32_t best = 0;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        bool place = moe_membership__is_place(m, s);
        if (member->state == SLOT_TAKEN || moe_membership__is_cordoned(m, s) ||
            (!place && r->trains))
            continue;
        bool own = member->state == SLOT_LEFT && strcmp(member->worker_id, r->worker_id) == 0;
        uint32_t rank = own                                ? 4
                        : r->wanted_slot_plus_one == s + 1 ? 3
                        : member->state == SLOT_EMPTY      ? 2
                                                           : 1;
        rank += place ? 4 : 0;
        if (rank > best) {
            best = rank;
            *slot = s;
        }
    }
    return best > 0;
}

static bool find_worker(const struct moe_membership *m, const char *worker_id, uint32_t *slot)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        if (m->members[s].state == SLOT_TAKEN && strcmp(m->members[s].worker_id, worker_id) == 0) {
            *slot = s;
            return true;
        }
    }
    return false;
}

/* ------------------------------------------------------------------ agreement of workers */

_Static_assert((int)MOE_WORKER_ID_MAX < (int)MOE_MEMBERSHIP_ID_BYTES,
               "a worker_id fits with its final 0");

/* A word that fits `size` bytes with its final 0. */
static bool is_word(const char *s, size_t size)
{
    return moe_word_ok(s, size - 1);
}

/* A name: UTF-8 without control characters. Checks only the form of sequences. */
static bool is_name(const char *s, size_t size)
{
    size_t n = 0, follow = 0;
    for (; s[n] != '\0'; n++) {
        unsigned char c = (unsigned char)s[n];
        bool continues = (c & 0xc0) == 0x80;
        if (n + 1 >= size || c < ' ' || c == 0x7f || continues != (follow > 0))
            return false;
        if (continues)
            follow--;
        else
            follow = c < 0x80 ? 0 : c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
    }
    return n > 0 && follow == 0;
}

/* Not known, or one word. */
static bool is_host_text(const char *s)
{
    return s == NULL || s[0] == '\0' || is_word(s, MOE_MEMBERSHIP_HOST_BYTES);
}

static bool is_host(const struct moe_membership_host *h)
{
    return is_host_text(h->id) && is_host_text(h->name) && is_host_text(h->domain) &&
           is_host_text(h->network_address);
}

static void copy_host_text(char *to, const char *from)
{
    moe_membership_copy_text(to, MOE_MEMBERSHIP_HOST_BYTES, from != NULL ? from : "");
}

static void copy_host(struct member *member, const struct moe_membership_host *h)
{
    copy_host_text(member->host.id, h->id);
    copy_host_text(member->host.name, h->name);
    copy_host_text(member->host.domain, h->domain);
    copy_host_text(member->host.network_address, h->network_address);
}

/* Others connect to it; a wildcard would lead them to their own hosts. */
static bool is_endpoint(const char *text)
{
    if (!is_word(text, MOE_MEMBERSHIP_ENDPOINT_BYTES))
        return false;
    struct moe_status st = moe_endpoint_check("", text);
    return !moe_failed(&st) && !moe_endpoint_is_wildcard(text);
}

static struct moe_status check_register(const struct moe_membership_register *r)
{
    const char *bad = !is_word(r->worker_id, MOE_MEMBERSHIP_ID_BYTES)      ? "worker_id"
                      : !is_endpoint(r->endpoint)                          ? "endpoint"
                      : !is_endpoint(r->control_endpoint)                  ? "control_endpoint"
                      : !is_word(r->backend, MOE_MEMBERSHIP_SHORT_BYTES)   ? "backend"
                      : !is_name(r->model, MOE_MEMBERSHIP_ID_BYTES)        ? "model"
                      : !is_word(r->fingerprint, MOE_MEMBERSHIP_ID_BYTES)  ? "model_fingerprint"
                      : !is_word(r->family, MOE_MEMBERSHIP_SHORT_BYTES)    ? "family"
                      : !is_word(r->version, MOE_MEMBERSHIP_SHORT_BYTES)   ? "version"
                      : !is_host(&r->host)                                 ? "host"
                      : r->incarnation == 0                                ? "incarnation"
                      : r->slot_token == NULL                              ? "slot_token"
                      : r->max_tokens_per_step == 0                        ? "max_tokens_per_step"
                      : r->layer_count == 0 || r->layer_count > LAYERS_MAX ? "layers"
                                                                           : NULL;
    if (bad != NULL)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_MALFORMED,
                         "Register.%s is missing or not acceptable", bad);
    return moe_ok();
}

/* Length of "major.minor" in "major.minor.patch". */
static size_t release_length(const char *version)
{
    const char *dot = strchr(version, '.');
    dot = dot != NULL ? strchr(dot + 1, '.') : NULL;
    return dot != NULL ? (size_t)(dot - version) : strlen(version);
}

static struct moe_status check_version(const struct moe_membership *m, const char *version)
{
    size_t n = release_length(m->config.version);
    if (release_length(version) == n && strncmp(version, m->config.version, n) == 0)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "worker release %.31s does not go with coordinator release %.31s", version,
                     m->config.version);
}

static struct moe_status check_model(const struct moe_membership *m,
                                     const struct moe_membership_register *r)
{
    const char *differs = strcmp(m->fingerprint, r->fingerprint) != 0 ? "model fingerprint"
                          : strcmp(m->backend, r->backend) != 0       ? "backend"
                          : strcmp(m->family, r->family) != 0         ? "model family"
                          : m->layer_count != r->layer_count ||
                                  !moe_membership_same_layers(m->layers, r->layers, r->layer_count)
                              ? "layer list, or the form of its weights (--weights, --fp8-compute),"
                              : NULL;
    if (differs == NULL)
        return moe_ok();
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "the %s differs from that of the workers already in the group", differs);
}

/* Experts have moved, and the model has the same layers. */
static bool keeps_placement(const struct moe_membership *m,
                            const struct moe_placement_layer *layers, size_t count)
{
    bool same = m->moved && count == moe_placement_layer_count(m->placement);
    for (size_t i = 0; same && i < count; i++) {
        struct moe_placement_layer l = moe_placement_layer_at(m->placement, i);
        same = l.layer == layers[i].layer && l.experts == layers[i].experts;
    }
    return same;
}

/* Makes the worker's model that of the group, and places its experts. */
static struct moe_status adopt_model(struct moe_membership *m,
                                     const struct moe_membership_register *r)
{
    struct moe_placement_layer layers[LAYERS_MAX];
    for (size_t i = 0; i < r->layer_count; i++)
        layers[i] = (struct moe_placement_layer){r->layers[i].layer, r->layers[i].experts};
    m->model_known = false;
    const struct moe_status changed =
        moe_error(MOE_ABORTED, MOE_REASON_NONE, "the model has changed");
    moe_membership__abandon_scaling(m, &changed);
    if (!keeps_placement(m, layers, r->layer_count)) {
        m->moved = false;
        MOE_TRY(moe_placement_set_linear(m->placement, m->saved.placement_version, m->saved.places,
                                         m->config.replicas, layers, r->layer_count));
    }
    uint64_t hash = moe_placement_content_hash(m->placement);
    if (m->saved.placement_version == 0 || hash != m->saved.placement_hash) {
        moe_membership__end_epoch(m, MOE_CAUSE_OUT_OF_STEP,
                                  "the model, or the number of copies, has changed");
        m->saved.placement_version = moe_membership__new_version(m);
        m->saved.placement_hash = hash;
        m->placement_durable = false;
        m->awaited_save = 0;
        moe_placement_set_version(m->placement, m->saved.placement_version);
    }
    moe_membership_copy_text(m->backend, sizeof m->backend, r->backend);
    moe_membership_copy_text(m->family, sizeof m->family, r->family);
    snprintf(m->model, sizeof m->model, "%s", r->model);
    moe_membership_copy_text(m->fingerprint, sizeof m->fingerprint, r->fingerprint);
    memcpy(m->layers, r->layers, r->layer_count * sizeof *r->layers);
    m->layer_count = r->layer_count;
    m->model_known = true;
    return moe_ok();
}

/* Workers must have the model of the group. The only worker of a group may change it. */
static struct moe_status agree_on_model(struct moe_membership *m,
                                        const struct moe_membership_register *r)
{
    bool alone = true;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        bool here = member->state == SLOT_TAKEN && member->endpoint[0] != '\0';
        bool replaced =
            strcmp(member->worker_id, r->worker_id) == 0 && member->incarnation != r->incarnation;
        if (here && !replaced)
            alone = false;
    }
    return m->model_known && !alone ? check_model(m, r) : adopt_model(m, r);
}

/* ------------------------------------------------------------------ register */

/* May this process have the slot of a member with its worker_id? The same process shows its token.
 * A new process takes over from one that is gone: it waits until the old one is disconnected, and
 * under another identity until the lease is over. So no caller ends a living worker. */
static struct moe_status check_claim(const struct moe_membership *m, const struct member *member,
                                     const struct moe_membership_register *r)
{
    uint64_t end_ns = member->last_message_ns + m->config.lease_ns;
    if (member->endpoint[0] == '\0' || m->now_ns >= end_ns)
        return moe_ok(); /* known from the log only, or about to lose its slot */
    if (member->incarnation == r->incarnation)
        return moe_secret_equal(member->slot_token, r->slot_token, MOE_MEMBERSHIP_TOKEN_BYTES)
                   ? moe_ok()
                   : moe_error(MOE_PERMISSION_DENIED, MOE_REASON_NONE,
                               "another process has registered as this one");
    bool own = strcmp(member->identity, r->identity) == 0;
    if (own && member->stream == 0)
        return moe_ok();
    uint32_t left_ms = (uint32_t)((end_ns - m->now_ns) / MOE_NS_PER_MS) + 1;
    return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN, left_ms,
                           "worker_id %s is taken by %s process at %s until its lease ends",
                           member->worker_id, own ? "a connected" : "another identity's",
                           member->endpoint);
}

static void confirm(struct moe_membership *m, uint32_t slot)
{
    struct moe_membership_action *a = moe_membership__send(m, slot, MOE_MEMBERSHIP_REGISTERED);
    MOE_INVARIANT(a != NULL);
    a->epoch = m->announced_epoch;
}

/* The worker may be what the group lacked. A spare is not: it takes part in no view. */
static void expect_more(struct moe_membership *m, const struct moe_membership_register *r)
{
    m->trains = r->trains;
    m->attempts = 0;
    m->waits = 0;
    m->failed = false;
    m->next_try_ns = m->now_ns;
    if (m->view_epoch == 0 && !m->degraded)
        m->mask_from_ns = m->now_ns + m->config.lease_ns;
}

static void take_slot(struct moe_membership *m, uint64_t stream, uint32_t slot,
                      const struct moe_membership_register *r)
{
    struct member *member = &m->members[slot];
    moe_membership__forget_readers(m, UINT64_C(1) << slot);
    *member = (struct member){.state = SLOT_TAKEN,
                              .incarnation = r->incarnation,
                              .stream = stream,
                              .last_message_ns = m->now_ns,
                              .max_tokens = r->max_tokens_per_step};
    memcpy(member->slot_token, r->slot_token, sizeof member->slot_token);
    moe_membership_copy_text(member->worker_id, sizeof member->worker_id, r->worker_id);
    moe_membership_copy_text(member->endpoint, sizeof member->endpoint, r->endpoint);
    copy_host(member, &r->host);
    moe_membership_copy_text(member->control_endpoint, sizeof member->control_endpoint,
                             r->control_endpoint);
    (void)snprintf(member->identity, sizeof member->identity, "%s", r->identity);
    if (MOE_GUARD(SPARES_TRY_NOTHING, moe_membership__is_place(m, slot)))
        expect_more(m, r);
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_JOINED, slot, "slot %u: %s at %s", slot,
                        member->worker_id, member->endpoint);
    moe_membership__remember(m, member);
    confirm(m, slot);
}

void moe_membership__drain(struct moe_membership *m, uint32_t slot, const char *reason,
                           uint32_t limit_ms)
{
    struct member *member = &m->members[slot];
    member->draining = true;
    member->drain_limit_ms = limit_ms;
    struct moe_membership_action *a = moe_membership__send(m, slot, MOE_MEMBERSHIP_DRAIN);
    if (a == NULL)
        return; /* reconnect sends it */
    a->limit_ms = limit_ms;
    moe_membership_copy_text(a->status.text, sizeof a->status.text, reason);
}

/* A member of the view loads its next share, and holds its present one. An order of the present one
 * would end that load. */
static bool loads_next(const struct moe_membership *m, uint32_t slot)
{
    return (m->view_live & m->next.asked & ~m->next.loaded & UINT64_C(1) << slot) != 0;
}

/* The slot's process registers on a new stream, or again on the same one. Messages of the old
 * stream may be lost: a forming epoch starts over, and the next heartbeat must confirm a view. */
static void reconnect(struct moe_membership *m, uint64_t stream, uint32_t slot,
                      const struct moe_membership_register *r)
{
    struct member *member = &m->members[slot];
    if (member->stream == stream) {
        confirm(m, slot);
        return;
    }
    char why[MOE_MEMBERSHIP_REASON_BYTES];
    snprintf(why, sizeof why, "slot %u reconnected", slot);
    if (member->stream != 0)
        moe_membership__close(
            m, member->stream,
            moe_error(MOE_ABORTED, MOE_REASON_NONE, "replaced by a newer stream"));
    member->stream = 0;
    if (m->phase != PHASE_IDLE && moe_membership__takes_part(m, slot))
        moe_membership__end_epoch(m, MOE_CAUSE_NOT_FORMED, why);
    member->stream = stream;
    member->max_tokens = r->max_tokens_per_step;
    moe_membership_copy_text(member->endpoint, sizeof member->endpoint, r->endpoint);
    copy_host(member, &r->host);
    moe_membership_copy_text(member->control_endpoint, sizeof member->control_endpoint,
                             r->control_endpoint);
    memcpy(member->slot_token, r->slot_token, sizeof member->slot_token);
    (void)snprintf(member->identity, sizeof member->identity, "%s", r->identity);
    member->unverified = m->view_epoch != 0 && moe_membership__takes_part(m, slot);
    member->missed = false;
    if (moe_membership__is_place(m, slot))
        m->trains = r->trains;
    if (!loads_next(m, slot))
        member->assigned = (member->loaded || member->load_failed) && member->order == 0;
    member->order = 0;
    m->next.asked &= m->next.loaded | ~(UINT64_C(1) << slot);
    uint64_t again = (m->join.asked | m->join.read | m->join.again) & UINT64_C(1) << slot;
    moe_membership__forget_readers(m, UINT64_C(1) << slot);
    m->join.again |= again;
    moe_membership__learn_session(m, slot, r);
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_RECONNECTED, slot, "%s", why);
    confirm(m, slot);
    if (member->draining)
        moe_membership__drain(m, slot, "requested before", member->drain_limit_ms);
}

/* ------------------------------------------------------------------ newcomers that read
 *
 * In a group that trains with copies, a worker outside of the view lacks the members' state. Once a
 * checkpoint has it, the members hold changes back and report it, and the worker is ordered to read
 * it. The view goes on meanwhile. It ends once all that read have answered, or time is up. */

void moe_membership__forget_readers(struct moe_membership *m, uint64_t slots)
{
    m->join.asked &= ~slots;
    m->join.awaited &= ~slots;
    m->join.read &= ~slots;
    m->join.failed &= ~slots;
    m->join.again &= ~slots;
}

/* Training waits for them in the state `state`, from now on. */
static void begin_reading(struct moe_membership *m, const struct moe_saved_training *state)
{
    m->join.state = *state;
    m->join.first_order = m->last_order + 1;
    m->join.deadline_ns = m->now_ns + m->config.read_ns;
    m->join.awaited = m->join.read = m->join.failed = m->join.again = 0;
}

static void order_to_read(struct moe_membership *m, uint32_t slot)
{
    struct moe_membership_action *a = moe_membership__send(m, slot, MOE_MEMBERSHIP_READ_CHECKPOINT);
    if (a == NULL)
        return;
    a->order = m->members[slot].read_order = ++m->last_order;
    m->join.asked |= UINT64_C(1) << slot;
    m->join.again &= ~(UINT64_C(1) << slot);
}

static void order_and_await(struct moe_membership *m, uint32_t slot)
{
    order_to_read(m, slot);
    if ((m->join.asked >> slot & 1) == 0)
        return;
    m->join.awaited |= UINT64_C(1) << slot;
    moe_membership__log(m, MOE_LOG_INFO, MOE_EVENT_JOINED, slot,
                        "slot %u reads checkpoint %s; training waits meanwhile, for %" PRIu64
                        " s at most",
                        slot, m->join.state.checkpoint, m->config.read_ns / MOE_NS_PER_S);
}

/* They were late, or have read the state, and their answers may be lost with the old stream.
 * Without a wait: a worker that has read the state answers at once. */
static void order_again(struct moe_membership *m, uint64_t newcomers)
{
    uint64_t slots = newcomers & m->join.again & ~m->join.asked & ~m->join.read & ~m->join.failed;
    for (uint32_t s = 0; s < m->config.slots; s++)
        if ((slots >> s & 1) != 0)
            order_to_read(m, s);
}

/* Training goes on without those that have not read the state yet. */
static void end_reading(struct moe_membership *m, uint64_t newcomers)
{
    char slots[MOE_MEMBERSHIP_SLOT_LIST_BYTES];
    moe_membership__list_slots(slots, m->join.awaited);
    if (m->join.awaited != 0)
        moe_membership__log(m, MOE_LOG_WARN, MOE_EVENT_LOAD_FAILED,
                            (uint32_t)__builtin_ctzll(m->join.awaited),
                            "checkpoint %s is not read in time by %s: training goes on",
                            m->join.state.checkpoint, slots);
    m->join.awaited = 0;
    m->join.failed |= newcomers & ~m->join.asked & ~m->join.read;
}

/* A worker outside of the view has loaded: it may join once the view can grow. */
static bool may_join(const struct moe_membership *m)
{
    for (uint32_t s = 0; s < m->config.slots; s++)
        if ((m->view_live >> s & 1) == 0 && m->members[s].state == SLOT_TAKEN &&
            m->members[s].loaded)
            return true;
    return false;
}

void moe_membership__ask_to_read(struct moe_membership *m, uint64_t newcomers,
                                 const struct moe_saved_training *state, bool all)
{
    const struct moe_saved_training none = {0};
    if (newcomers == 0 && !may_join(m))
        begin_reading(m, &none);
    if (newcomers == 0)
        return;
    if (state != NULL && !moe_saved_training_same(state, &m->join.state))
        begin_reading(m, state);
    if (m->join.state.calls == 0)
        return;
    if (m->now_ns >= m->join.deadline_ns) {
        order_again(m, newcomers);
        end_reading(m, newcomers);
        return;
    }
    uint64_t able = newcomers & ~m->join.asked & ~m->join.read & ~m->join.failed;
    for (uint32_t s = 0; state != NULL && all && s < m->config.slots; s++)
        if ((able >> s & 1) != 0)
            order_and_await(m, s);
}

/* Training waits for it in each Save, but not for ever. */
static void count_failure(struct moe_membership *m, uint32_t slot, const struct moe_status *error)
{
    struct member *member = &m->members[slot];
    struct moe_status last =
        moe_error(error->code, error->reason,
                  "%d checkpoints in a row were not read, and training waits for this worker no "
                  "more; mend the cause and restart it: %s",
                  READ_FAILURES_MAX, error->text);
    member->read_failures++;
    moe_membership__keep_error(member, moe_membership__may_read(m, slot) ? error : &last);
    moe_membership__log(m, MOE_LOG_ERROR, MOE_EVENT_LOAD_FAILED, slot,
                        "slot %u cannot take part before %s: %s", slot,
                        moe_membership__may_read(m, slot) ? "the next SaveCheckpoint" : "a restart",
                        member->error.text);
}

bool moe_membership__may_read(const struct moe_membership *m, uint32_t slot)
{
    return m->members[slot].read_failures < READ_FAILURES_MAX;
}

void moe_membership__checkpoint_read(struct moe_membership *m, uint32_t slot, uint64_t order,
                                     const struct moe_status *error)
{
    uint64_t bit = UINT64_C(1) << slot;
    if ((m->join.asked & bit) == 0 || order != m->members[slot].read_order)
        return;
    m->join.asked &= ~bit;
    m->join.awaited &= ~bit;
    bool present = MOE_GUARD(READ_IS_OF_THIS_STATE, order >= m->join.first_order);
    if (error->code == MOE_OK) {
        m->join.read |= present ? bit : 0;
        m->members[slot].read_failures = 0;
        return;
    }
    if (error->code == MOE_CANCELLED) /* for a view, or a load: it is asked again */
        return;
    m->join.failed |= present ? bit : 0;
    if (error->reason == MOE_REASON_VERSION_MISMATCH) /* it is asked again to load */
        m->members[slot].assigned = m->members[slot].loaded = false;
    if (present)
        count_failure(m, slot, error);
}

uint64_t moe_membership__find_readers(const struct moe_membership *m, uint64_t newcomers,
                                      const struct moe_saved_training *state)
{
    if (state == NULL || !moe_saved_training_same(state, &m->join.state) ||
        (newcomers & m->join.awaited) != 0)
        return 0;
    bool all_have = MOE_GUARD(NEWCOMERS_READ, (newcomers & ~m->join.read) == 0);
    return all_have ? newcomers : newcomers & m->join.read;
}

uint64_t moe_membership__free_to_read(const struct moe_membership *m, uint64_t newcomers)
{
    return newcomers & ~(m->join.asked & ~m->join.awaited);
}

uint64_t moe_membership__released_calls(const struct moe_membership *m, uint64_t newcomers)
{
    uint64_t waits = moe_membership__free_to_read(m, newcomers) & ~m->join.failed;
    return waits == 0 ? m->join.state.calls : 0;
}

/* ------------------------------------------------------------------ who has a slot */

static struct moe_status cordoned_slot(const struct moe_membership *m, uint32_t slot)
{
    return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN,
                           (uint32_t)(m->config.lease_ns / MOE_NS_PER_MS),
                           "slot %u is cordoned: %s", slot, m->saved.cordon_reasons[slot]);
}

/* Slots that such a worker could have. */
static uint32_t count_usable(const struct moe_membership *m, bool trains)
{
    return trains ? moe_membership__size(m) : m->config.slots;
}

/* The error says when a slot may become free: when the lease of a disconnected worker ends. */
static struct moe_status no_free_slot(const struct moe_membership *m, bool trains)
{
    uint64_t first_ns = MOE_NEVER;
    uint32_t slot = 0;
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *member = &m->members[s];
        if (member->state != SLOT_TAKEN && moe_membership__is_cordoned(m, s))
            return cordoned_slot(m, s);
        if (member->state != SLOT_TAKEN)
            continue; /* one for spares, which do not train */
        if (member->stream == 0 && member->last_message_ns + m->config.lease_ns < first_ns) {
            first_ns = member->last_message_ns + m->config.lease_ns;
            slot = s;
        }
    }
    if (first_ns == MOE_NEVER)
        return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN,
                               (uint32_t)(m->config.lease_ns / MOE_NS_PER_MS),
                               "all %u slots are taken", count_usable(m, trains));
    uint64_t left_ns = first_ns > m->now_ns ? first_ns - m->now_ns : 0;
    uint32_t left_ms = (uint32_t)(left_ns / MOE_NS_PER_MS) + 1;
    return moe_error_retry(MOE_RESOURCE_EXHAUSTED, MOE_REASON_SLOT_TAKEN, left_ms,
                           "all %u slots are taken; slot %u is not connected, its lease ends in "
                           "%u.%u s",
                           count_usable(m, trains), slot, left_ms / 1000, left_ms % 1000 / 100);
}

/* Peers and clients dial the address, so it must not be that of another worker. */
static struct moe_status check_address(const struct moe_membership *m,
                                       const struct moe_membership_register *r)
{
    for (uint32_t s = 0; s < m->config.slots; s++) {
        const struct member *other = &m->members[s];
        if (other->state == SLOT_TAKEN && other->stream != 0 &&
            strcmp(other->worker_id, r->worker_id) != 0 &&
            strcmp(other->endpoint, r->endpoint) == 0)
            return moe_error(MOE_ALREADY_EXISTS, MOE_REASON_NONE,
                             "%s is the address of %s, in slot %u: check --advertise", r->endpoint,
                             other->worker_id, s);
    }
    return moe_ok();
}

/* What the settings of the group ask of every worker. */
static struct moe_status check_kind(const struct moe_membership *m,
                                    const struct moe_membership_register *r)
{
    if (r->trains && m->config.replicas > 1 && !r->trains_with_copies)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the backend %.20s does not train in a group with replicas (%u copies of "
                         "each expert): start the workers without --training, or the coordinator "
                         "with --replicas 1",
                         r->backend, m->config.replicas);
    if (r->trains && m->config.partial)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "a group with views that may lack experts does not train: start the "
                         "workers without --training, or the coordinator without --partial-views");
    if (r->trains && m->config.spare > 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "a group with places for moves does not train: start the workers without "
                         "--training, or the coordinator without --spare-experts");
    if (m->config.spare > 0 && !r->moves_experts)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the backend %.20s moves no experts: start the coordinator without "
                         "--spare-experts",
                         r->backend);
    if (m->config.partial && !r->partial)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "the backend %.20s runs no steps without all experts: start the "
                         "coordinator without --partial-views",
                         r->backend);
    return moe_ok();
}

struct moe_status moe_membership__register(struct moe_membership *m, uint64_t stream,
                                           const struct moe_membership_register *r)
{
    MOE_TRY(check_register(r));
    MOE_TRY(check_version(m, r->version));
    MOE_TRY(check_kind(m, r));
    if (is_fenced(m, r))
        return stale_process();
    uint32_t slot = 0, other;
    bool known = find_worker(m, r->worker_id, &slot);
    bool same = known && m->members[slot].incarnation == r->incarnation;
    if (moe_membership__find_stream(m, stream, &other) && !(same && other == slot))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_NONE,
                         "a stream registers one worker process");
    if (m->shutting_down && !same)
        return moe_error(MOE_UNAVAILABLE, MOE_REASON_DRAINING, "the group is shutting down");
    MOE_TRY(check_address(m, r));
    if (!known && !pick_slot(m, r, &slot))
        return no_free_slot(m, r->trains);
    if (known)
        MOE_TRY(check_claim(m, &m->members[slot], r));
    if (known && !same && moe_membership__is_cordoned(m, slot))
        return cordoned_slot(m, slot);
    MOE_TRY(agree_on_model(m, r));
    if (same) {
        m->members[slot].last_message_ns = m->now_ns;
        reconnect(m, stream, slot, r);
        return moe_ok();
    }
    if (m->restoring) /* the first to tell of its kind: the view that ends may be one that trains */
        m->trains = r->trains;
    if (known)
        moe_membership__lose(m, slot, MOE_CAUSE_REPLACED, "was replaced by a new process",
                             stale_process());
    take_slot(m, stream, slot, r);
    return moe_ok();
}
