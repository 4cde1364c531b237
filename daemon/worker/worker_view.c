/* SPDX-License-Identifier: Apache-2.0 */
/* Views, on the serial executor only: load weights, join and verify a session, read a checkpoint,
 * serve, leave. See
 * group/group.h for when. */
#include "worker/worker_state.h"

#include "base/clock.h"
#include "checkpoint/checkpoint.h"
#include "daemon/log.h"
#include "moe/window.h"
#include "training/training.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

static struct moe_status update_service(struct moe_worker *w, uint64_t epoch)
{
    const char *endpoints[MOE_MAX_SLOTS];
    for (uint32_t s = 0; s < w->view.slots; s++)
        endpoints[s] = w->view.endpoints[s];
    return moe_service_set_view(w->service, epoch, endpoints, epoch != 0 ? w->view.slots : 0);
}

static void set_epoch(struct moe_worker *w, uint64_t epoch)
{
    atomic_store(&w->epoch, epoch);
    moe_log_set_epoch(epoch);
    moe_worker_metrics_epoch(&w->metrics, epoch);
}

/* A group that trains compares its state as each view forms, over the session's windows: it joins a
 * new one, and takes no mask. */
static uint64_t together(const struct moe_worker *w)
{
    const struct moe_backend *backend = w->config.backend;
    bool masks = backend->session_together != NULL && w->train == NULL;
    return masks ? backend->session_together(w->session) : 0;
}

void moe_worker__drop_session(void *ctx)
{
    struct moe_worker *w = ctx;
    if (w->session != NULL)
        w->config.backend->session_leave(w->session);
    w->session = NULL;
}

/* The session stays if the next view may be a mask of it. */
void moe_worker__leave_view(void *ctx)
{
    struct moe_worker *w = ctx;
    if (w->view.epoch == 0)
        return;
    w->view.epoch = 0;
    set_epoch(w, 0);
    moe_worker__show_health(w);
    struct moe_status st = update_service(w, 0);
    if (moe_failed(&st))
        moe_log_error("service: %s", st.text);
    moe_peers_stop(w->peers);
    moe_engine_stop_view(w->engine);
    if (w->session != NULL && together(w) == 0)
        moe_worker__drop_session(w);
    moe_worker_metrics_transport(&w->metrics, NULL);
}

/* Activations are optional: without room for them next to gradients and optimizer state, Backward
 * computes them again. */
static void leave_room(struct moe_worker *w, uint64_t state_bytes)
{
    uint64_t bytes = w->config.retained_device_bytes, both;
    if (__builtin_add_overflow(bytes, state_bytes, &both))
        both = UINT64_MAX;
    struct moe_status st = moe_loader_check_room(
        w->loader, both, "gradients, optimizer state and retained activations");
    if (bytes > 0 && moe_failed(&st)) {
        moe_log_warn("no activations are retained for Backward (--retained-device-bytes): %s",
                     st.text);
        bytes = 0;
    }
    moe_activations_set_limit(moe_train_activations(w->train), bytes);
}

static struct moe_status attach_training(struct moe_worker *w)
{
    uint64_t bytes;
    struct moe_layer *const *layers = moe_loader_layers(w->loader);
    if (w->train == NULL)
        return moe_ok();
    MOE_TRY(moe_train_bytes(w->train, layers, &bytes));
    MOE_TRY(moe_loader_check_room(w->loader, bytes, "gradients and optimizer state"));
    leave_room(w, bytes);
    return moe_train_attach(w->train, layers, *moe_loader_placements(w->loader));
}

static struct moe_status compare_with_manifest(struct moe_worker *w, struct moe_digest_table *want)
{
    struct moe_digest_difference d;
    enum moe_checkpoint_digests found;
    MOE_TRY(moe_checkpoint_read_digests(w->config.model, want, &found));
    if (found == MOE_CHECKPOINT_DIGESTS_UNKNOWN)
        moe_log_info("%s is a checkpoint without digests: its weights are not checked",
                     moe_model_name(w->model));
    if (found == MOE_CHECKPOINT_DIGESTS_FOUND && moe_loader_differs(w->loader, want, &d))
        return moe_error(MOE_DATA_LOSS, MOE_REASON_MODEL_MISMATCH,
                         "%.150s has other bytes than the checkpoint's manifest says", d.name);
    return moe_ok();
}

/* The weights of a checkpoint that is served as a model are those that were saved. */
static struct moe_status check_manifest(struct moe_worker *w)
{
    struct moe_digest_table *want;
    MOE_TRY(moe_digest_table_create(&want));
    struct moe_status st = compare_with_manifest(w, want);
    moe_digest_table_destroy(want);
    return st;
}

struct moe_status moe_worker__load(void *ctx, const struct moe_group_assignment *assignment)
{
    struct moe_worker *w = ctx;
    if (assignment->keep) {
        if (w->train != NULL)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                             "a worker that trains loads no second share");
        MOE_TRY(moe_loader_version(w->loader) == 0
                    ? moe_loader_load(w->loader, assignment)
                    : moe_loader_fetch(w->loader, assignment, moe_loader_order_fetch(w->loader),
                                       100, NULL, NULL));
        return check_manifest(w);
    }
    bool held = moe_loader_accept(w->loader, assignment);
    if (w->view.epoch != 0 && !held) {
        moe_group_report_lost(
            w->group, w->view.epoch, 0,
            moe_error(MOE_ABORTED, MOE_REASON_REFORMING, "another placement must be loaded"));
        moe_worker__leave_view(w);
    }
    if (!held)
        moe_worker__drop_session(w); /* the weights may need its memory */
    if (held && (w->train == NULL || moe_train_attached(w->train)))
        return check_manifest(w);
    if (w->train != NULL)
        moe_train_detach(w->train);
    uint64_t begun_ns = moe_clock_ns();
    MOE_TRY(moe_loader_load(w->loader, assignment));
    moe_worker_metrics_loaded(&w->metrics, moe_clock_ns() - begun_ns);
    MOE_TRY(check_manifest(w));
    return attach_training(w);
}

struct moe_status moe_worker__digests(void *ctx, moe_group_part_fn add, void *add_ctx)
{
    const struct moe_worker *w = ctx;
    return moe_loader_pass_digests(w->loader, add, add_ctx);
}

static struct moe_status keep_view(struct moe_worker *w, const struct moe_group_view *v)
{
    w->view.epoch = v->epoch;
    w->view.live = v->live;
    w->view.slots = v->slots;
    w->view.max_tokens = v->max_tokens_per_step;
    if (strlen(v->model) >= sizeof w->view.model ||
        strlen(v->model_digest) >= sizeof w->view.model_digest)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                         "the name or digest of the model is too long");
    strcpy(w->view.model, v->model);
    strcpy(w->view.model_digest, v->model_digest);
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const char *endpoint = v->live >> s & 1 ? v->members[s].endpoint : "";
        if (strlen(endpoint) >= MOE_WORKER_ENDPOINT_BYTES)
            return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE,
                             "the endpoint of slot %u is too long", s);
        strcpy(w->view.endpoints[s], endpoint);
    }
    return moe_ok();
}

/* An address or id that does not fit is one that no slot of this release sends. */
static void describe_hosts(const struct moe_group_view *v, struct moe_session_host *hosts)
{
    memset(hosts, 0, MOE_MAX_SLOTS * sizeof *hosts);
    for (uint32_t s = 0; s < v->slots; s++) {
        const struct moe_group_member *m = &v->members[s];
        if (!(v->live >> s & 1))
            continue;
        (void)snprintf(hosts[s].id, sizeof hosts[s].id, "%s", m->host_id);
        (void)snprintf(hosts[s].domain, sizeof hosts[s].domain, "%s", m->domain);
        (void)snprintf(hosts[s].address, sizeof hosts[s].address, "%s", m->network_address);
    }
}

/* Slots with other sizes refuse each other: says which options decide them. */
static struct moe_status name_widths(const struct moe_worker *w, struct moe_status st)
{
    const struct moe_worker_config *c = &w->config;
    if (c->max_hidden == 0 && c->max_experts == 0 && c->max_top_k == 0)
        return st;
    return moe_error_context(
        st,
        "--max-hidden %u, --max-experts %u, --max-top-k %u, which are the same "
        "on all workers",
        c->max_hidden, c->max_experts, c->max_top_k);
}

/* Largest bucket of F32 tokens. Half as many tokens need the memory of BF16 tokens. A group that
 * trains sends fp32 gradients anyway, and a Backward has as many tokens as its forward pass. A lone
 * worker's rows never pass through a window. */
static uint32_t max_tokens_f32(const struct moe_worker *w, const struct moe_group_view *v)
{
    const uint32_t all = v->max_tokens_per_step;
    bool half = w->config.backend->eager_windows && w->train == NULL && v->slots > 1 && all > 1;
    return half ? all / 2 : all;
}

static struct moe_status join_session(struct moe_worker *w, const struct moe_group_view *v,
                                      moe_allgather_fn allgather, void *allgather_ctx)
{
    struct moe_session_host hosts[MOE_MAX_SLOTS];
    describe_hosts(v, hosts);
    struct moe_session_config c = {
        .hosts = hosts,
        .domain_size = w->config.domain_size,
        .slot = v->slot,
        .slots = v->slots,
        .live = v->live,
        .epoch = v->epoch,
        .max_tokens = v->max_tokens_per_step,
        .max_tokens_f32 = max_tokens_f32(w, v),
        .max_hidden = w->widths.hidden,
        .max_top_k = w->widths.top_k,
        .max_experts = w->widths.experts,
        .training = w->train != NULL,
        .partial = v->partial && w->config.backend->partial,
        .wait_budget_ms = w->config.wait_budget_ms,
        .settings = w->config.device.settings,
        .allgather = allgather,
        .allgather_ctx = allgather_ctx,
    };
    MOE_TRY(name_widths(w, w->config.backend->session_join(w->device, &c, &w->session)));
    w->joined.epoch = v->epoch;
    w->joined.slot = v->slot;
    w->joined.slots = v->slots;
    w->joined.max_tokens = v->max_tokens_per_step;
    moe_worker_metrics_joined(&w->metrics);
    const char *transport = w->config.backend->session_transport(w->session);
    moe_worker_metrics_transport(&w->metrics, transport);
    bool network = strstr(transport, "network") != NULL && hosts[v->slot].address[0] != '\0';
    moe_log_info("epoch %llu: rows travel over %s%s%s", (unsigned long long)v->epoch, transport,
                 network ? ", here at " : "", network ? hosts[v->slot].address : "");
    if (strstr(transport, "network") != NULL && !w->said_unencrypted) {
        moe_log_warn("rows travel over the network without encryption: use a private one");
        w->said_unencrypted = true;
    }
    return moe_ok();
}

/* The session of an earlier view goes on without the slots that the view lacks. */
static struct moe_status mask_session(struct moe_worker *w, const struct moe_group_view *v)
{
    const struct moe_backend *backend = w->config.backend;
    if (w->session == NULL || w->joined.epoch != v->session_epoch || w->joined.slot != v->slot ||
        w->joined.slots != v->slots || w->joined.max_tokens < v->max_tokens_per_step)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING,
                         "this worker has kept no session of epoch %llu for this view",
                         (unsigned long long)v->session_epoch);
    MOE_TRY(backend->session_mask(w->session, v->epoch, v->live));
    moe_worker_metrics_masked(&w->metrics);
    moe_worker_metrics_transport(&w->metrics, backend->session_transport(w->session));
    moe_log_info("epoch %llu: keeps the session of epoch %llu", (unsigned long long)v->epoch,
                 (unsigned long long)v->session_epoch);
    return moe_ok();
}

/* Data that slots exchange before READY, through the windows. */
struct proof {
    uint64_t epoch, placement_hash;
    struct moe_train_digest digest;
};

_Static_assert(offsetof(struct proof, digest.config) + sizeof(uint64_t) <=
                   MOE_WINDOW_EXCHANGE_BYTES,
               "the first exchange shows whether all train alike");

/* After the first exchange: a group that does not train has no more to tell, and one with different
 * settings does not form. */
static bool all_train_alike(const struct proof *mine, const struct moe_group_view *v,
                            const struct proof *all)
{
    for (uint32_t s = 0; s < v->slots; s++)
        if ((v->live >> s & 1) != 0 && all[s].digest.config != mine->digest.config)
            return false;
    return mine->digest.config != 0;
}

static struct moe_status exchange(struct moe_worker *w, const struct moe_group_view *v,
                                  const struct proof *mine, struct proof *all)
{
    uint8_t parts[MOE_MAX_SLOTS * MOE_WINDOW_EXCHANGE_BYTES];
    for (size_t at = 0; at < sizeof *mine; at += MOE_WINDOW_EXCHANGE_BYTES) {
        if (at > 0 && !all_train_alike(mine, v, all))
            return moe_ok();
        size_t left = sizeof *mine - at;
        size_t bytes = left < MOE_WINDOW_EXCHANGE_BYTES ? left : MOE_WINDOW_EXCHANGE_BYTES;
        memset(parts, 0, sizeof parts);
        MOE_TRY(w->config.backend->session_exchange(w->session, (const uint8_t *)mine + at, parts,
                                                    bytes));
        for (uint32_t s = 0; s < v->slots; s++)
            memcpy((uint8_t *)&all[s] + at, parts + s * bytes, bytes);
    }
    return moe_ok();
}

static struct moe_status exchange_proofs(struct moe_worker *w, const struct moe_group_view *v,
                                         struct moe_train_digest digests[MOE_MAX_SLOTS])
{
    struct proof mine = {.epoch = v->epoch, .placement_hash = moe_loader_placement_hash(w->loader)};
    struct proof all[MOE_MAX_SLOTS];
    moe_train_read_digest(w->train, &mine.digest);
    memset(all, 0, sizeof all);
    MOE_TRY(exchange(w, v, &mine, all));
    for (uint32_t s = 0; s < v->slots; s++) {
        digests[s] = all[s].digest;
        if ((v->live >> s & 1) != 0 &&
            (all[s].epoch != mine.epoch || all[s].placement_hash != mine.placement_hash))
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                             "slot %u does not agree on epoch and placement", s);
    }
    return moe_ok();
}

/* Loads the model's weights again; all training is lost. */
static struct moe_status reload(struct moe_worker *w)
{
    moe_train_detach(w->train);
    MOE_TRY(moe_loader_reload(w->loader));
    return attach_training(w);
}

struct moe_status moe_worker__read_checkpoint(void *ctx, const struct moe_saved_training *state,
                                              uint32_t slot, uint32_t slots)
{
    struct moe_worker *w = ctx;
    struct moe_train_digest digest;
    if (w->train == NULL || w->view.epoch != 0)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING,
                         "this worker takes part in a view, or does not train");
    if (!moe_train_attached(w->train))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "this worker has not loaded");
    if (moe_train_has_ahead(w->train, state))
        return moe_ok();
    moe_train_read_digest(w->train, &digest);
    if (digest.lineage != 0) {
        struct moe_status st = reload(w);
        if (moe_failed(&st)) /* the trainers are gone: the coordinator asks it to load */
            st.reason = MOE_REASON_VERSION_MISMATCH;
        MOE_TRY(st);
    }
    struct moe_status st = moe_train_read_ahead(w->train, state, slot, slots);
    if (st.reason == MOE_REASON_VERSION_MISMATCH) /* of the checkpoint: no load helps */
        st.reason = MOE_REASON_CONFIG_INVALID;
    return st;
}

static struct moe_status recovery_error(const struct moe_train_digest *digests, uint64_t live,
                                        const struct moe_train_recovery *d)
{
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++)
        if ((live >> s & 1) != 0 && digests[s].inconsistent != 0)
            return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CANNOT_GO_BACK,
                             "slot %u cannot go back to %s%s: see the log of slot %u", s,
                             d->checkpoint[0] != '\0' ? "checkpoint " : "the model as loaded",
                             d->checkpoint, s);
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                     "the slots went back to different training states");
}

/* If slots have different training states, the whole group recovers to one; see training.proto. One
 * slot may reload for longer than another waits in the second exchange: then the epoch does not
 * form, and in the next one all slots have the new state. The attempts have no limit. `*without`:
 * slots that lack the state of the others, after a failure. */
static struct moe_status agree_on_training(struct moe_worker *w, const struct moe_group_view *v,
                                           struct moe_train_digest digests[MOE_MAX_SLOTS],
                                           uint64_t *without)
{
    struct moe_train_recovery decision, again;
    MOE_TRY(moe_train_choose_recovery(digests, v->live, &decision));
    if (w->train == NULL)
        return moe_ok();
    struct moe_status kept = moe_train_keep_copies(
        digests, v->live, v->has_heirs && moe_train_covers(w->train, decision.heirs), &decision);
    *without = decision.joiners;
    MOE_TRY(kept);
    bool joins = (decision.joiners >> v->slot & 1) != 0;
    bool reads = joins && !moe_train_is_joined(w->train, &decision);
    if (decision.restart || (reads && digests[v->slot].lineage != 0))
        MOE_TRY(reload(w));
    struct moe_status taken = moe_train_adopt(w->train, &decision, v->slot, v->slots, v->live);
    if (!decision.restart && decision.joiners == 0)
        return taken;
    /* A slot that could not recover tells the others by its digest. */
    struct moe_status exchanged = exchange_proofs(w, v, digests);
    if (decision.restart)
        taken.reason = exchanged.reason = MOE_REASON_CANNOT_GO_BACK;
    if (moe_failed(&taken))
        return taken;
    MOE_TRY(exchanged);
    MOE_TRY(moe_train_choose_recovery(digests, v->live, &again));
    if (!again.restart) {
        moe_train_note_problem(w->train, "");
        return moe_ok();
    }
    if (!decision.restart)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_REFORMING,
                         "slot %d could not read checkpoint %s: see its log",
                         __builtin_ctzll(decision.joiners), decision.checkpoint);
    struct moe_status st = recovery_error(digests, v->live, &decision);
    moe_train_note_problem(w->train, st.text);
    return st;
}

/* The proof before READY: every slot reads from every other slot's window that both have the same
 * epoch, placement and training state. A mask waits for no slot: all have proved themselves as they
 * joined, and the commit shows that all have taken it. */
static struct moe_status verify(struct moe_worker *w, const struct moe_group_view *v,
                                uint64_t *without)
{
    struct moe_train_digest digests[MOE_MAX_SLOTS] = {0};
    if (moe_loader_placement_hash(w->loader) != v->placement_hash)
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                         "this worker has another placement than epoch %llu",
                         (unsigned long long)v->epoch);
    if (v->session_epoch != 0)
        return moe_ok();
    MOE_TRY(exchange_proofs(w, v, digests));
    return agree_on_training(w, v, digests, without);
}

static struct moe_status expect_peers(struct moe_worker *w, const struct moe_group_view *v)
{
    struct moe_peers_view expected = {
        .epoch = v->epoch,
        .live = v->live,
        .slot = v->slot,
        .max_bucket = v->max_tokens_per_step,
        .max_bucket_f32 = max_tokens_f32(w, v),
        .may_shrink = v->may_shrink,
    };
    memcpy(expected.secret, v->secret, sizeof expected.secret);
    const char *own = v->members[v->slot].host_id;
    for (uint32_t s = 0; s < MOE_MAX_SLOTS; s++) {
        const struct moe_group_member *m = &v->members[s];
        bool known = own != NULL && own[0] != '\0' && m->host_id != NULL && m->host_id[0] != '\0';
        expected.members[s] = (struct moe_peer){m->incarnation, m->control_endpoint,
                                                known && strcmp(own, m->host_id) != 0};
    }
    return moe_peers_expect(w->peers, &expected);
}

static struct moe_status enter_session(struct moe_worker *w, const struct moe_group_view *v,
                                       moe_allgather_fn allgather, void *allgather_ctx)
{
    if (v->session_epoch != 0)
        return mask_session(w, v);
    moe_worker__drop_session(w);
    return join_session(w, v, allgather, allgather_ctx);
}

/* A session that a mask has failed in is kept: the next view may be a smaller mask of it. */
struct moe_status moe_worker__form(void *ctx, const struct moe_group_view *v,
                                   moe_allgather_fn allgather, void *allgather_ctx, uint64_t *slots)
{
    struct moe_worker *w = ctx;
    moe_worker__leave_view(w);
    moe_loader_adopt(w->loader, v->placement_hash);
    MOE_TRY(keep_view(w, v));
    struct moe_status st = enter_session(w, v, allgather, allgather_ctx);
    if (!moe_failed(&st))
        st = verify(w, v, slots);
    if (!moe_failed(&st) && w->train != NULL)
        st = moe_train_fence(w->train, v->group_id, v->epoch);
    if (!moe_failed(&st))
        st = expect_peers(w, v);
    if (moe_failed(&st)) {
        moe_worker__leave_view(w);
        if (v->session_epoch == 0)
            moe_worker__drop_session(w);
        return st;
    }
    *slots = together(w);
    return st;
}

struct moe_status moe_worker__serve(void *ctx)
{
    struct moe_worker *w = ctx;
    MOE_INVARIANT(w->session != NULL && w->view.epoch != 0);
    moe_engine_start_view(w->engine, w->session, w->view.epoch, w->view.live, w->view.max_tokens);
    MOE_TRY(moe_peers_start(w->peers));
    MOE_TRY(moe_service_set_model(w->service, w->view.model, w->view.model_digest));
    MOE_TRY(update_service(w, w->view.epoch));
    set_epoch(w, w->view.epoch);
    if (w->train != NULL)
        moe_train_in_force(w->train);
    moe_worker__show_health(w);
    moe_loader_settle_later(w->loader);
    return moe_ok();
}
