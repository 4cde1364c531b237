/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a server: the budget of received messages, the quota of the core above it, figures of
 * both, and what is given back to the system after a peak. */
#include "base/clock.h"
#include "daemon/metrics.h"
#include "rpc/serving.h"

#include <grpc/impl/codegen/grpc_types.h>
#include <malloc.h>

#define CHECK_EVERY_NS   MOE_NS_PER_S
#define USED_EVERY_NS    (MOE_NS_PER_S / 4) /* while there are messages */
#define QUIET_NS         (10 * MOE_NS_PER_S)
#define CONNECTION_BYTES (UINT64_C(24) << 10) /* what the core needs for a connection */
#define STREAM_BYTES     (UINT64_C(12) << 10) /* what the core needs for a call */
#define PEAK_BYTES       (UINT64_C(32) << 20) /* less is not worth a walk through the heap */
/* What the core needs in addition to messages: connections, headers, buffers of sockets. */
#define CORE_BYTES (UINT64_C(256) << 20)

static const char *name_of(const struct moe_rpc_server_config *config)
{
    return config->name != NULL ? config->name : "data";
}

static void hold(void *call)
{
    moe_rpc_call_ref(call);
}

static void refuse(void *call, struct moe_status why)
{
    moe_rpc_fail(call, why);
    moe_rpc_call_unref(call);
}

static void end(void *connection)
{
    moe_listener_end(connection);
}

void moe_rpc_memory_init(struct moe_rpc_memory *m, const struct moe_rpc_server_config *config)
{
    static const struct moe_rpc_waiters waiters = {hold, moe_rpc_start_granted, refuse, end};
    moe_rpc_budget_init(&m->budget, config->max_reading_bytes, config->max_waiting_reads, &waiters);
    uint64_t most = m->budget.limit[MOE_RPC_SMALL] + m->budget.limit[MOE_RPC_LARGE] +
                    (uint64_t)config->max_waiting_reads * MOE_RPC_LOOKAHEAD_BYTES + CORE_BYTES;
    if (config->max_core_bytes != 0)
        most = config->max_core_bytes;
    m->quota = grpc_resource_quota_create(name_of(config));
    grpc_resource_quota_resize(m->quota, most);
}

void moe_rpc_memory_end(struct moe_rpc_memory *m)
{
    grpc_resource_quota_unref(m->quota);
    moe_rpc_budget_destroy(&m->budget);
}

grpc_arg moe_rpc_memory_arg(const struct moe_rpc_memory *m)
{
    grpc_arg arg = {.type = GRPC_ARG_POINTER, .key = (char *)(uintptr_t)GRPC_ARG_RESOURCE_QUOTA};
    arg.value.pointer.p = m->quota;
    arg.value.pointer.vtable = grpc_resource_quota_arg_vtable();
    return arg;
}

/* ------------------------------------------------------------------ figures */

static struct moe_status add_gauge(const struct moe_rpc_server_config *config, const char *name,
                                   const char *help, struct moe_gauge **out)
{
    return moe_metrics_add_gauge(
        config->metrics,
        &(struct moe_metric_desc){
            .name = name, .help = help, .labels[0] = {"server", name_of(config)}},
        out);
}

static struct moe_status add_call_refusals(const struct moe_rpc_server_config *config,
                                           struct moe_rpc_figures *f)
{
    static const char *const reasons[] = {[MOE_RPC_UNAUTHENTICATED] = "unauthenticated",
                                          [MOE_RPC_DENIED] = "permission_denied",
                                          [MOE_RPC_UNKNOWN_METHOD] = "unknown_method",
                                          [MOE_RPC_UNAVAILABLE] = "unavailable"};
    for (int i = 0; i < MOE_RPC_CALL_REFUSALS; i++)
        MOE_TRY(moe_metrics_add_counter(
            config->metrics,
            &(struct moe_metric_desc){
                .name = "moe_rpc_calls_refused_total",
                .help = "Calls that ended before their method saw them, by reason.",
                .labels = {{"server", name_of(config)}, {"reason", reasons[i]}}},
            &f->calls_refused[i]));
    return moe_ok();
}

void moe_rpc_memory_count_refused(struct moe_rpc_memory *m, const struct moe_status *why)
{
    enum moe_rpc_call_refusal reason = why->code == MOE_UNAUTHENTICATED ? MOE_RPC_UNAUTHENTICATED
                                       : why->code == MOE_PERMISSION_DENIED ? MOE_RPC_DENIED
                                       : why->code == MOE_UNIMPLEMENTED     ? MOE_RPC_UNKNOWN_METHOD
                                                                            : MOE_RPC_UNAVAILABLE;
    if (m->figures.calls_refused[reason] != NULL)
        moe_counter_add(m->figures.calls_refused[reason], 1);
}

struct moe_status moe_rpc_memory_add_metrics(struct moe_rpc_memory *m,
                                             const struct moe_rpc_server_config *config)
{
    static const char *const reasons[] = {[MOE_RPC_QUEUE_FULL] = "queue_full",
                                          [MOE_RPC_TOO_LARGE] = "too_large",
                                          [MOE_RPC_TOO_SLOW] = "too_slow"};
    struct moe_rpc_figures *f = &m->figures;
    if (config->metrics == NULL)
        return moe_ok();
    MOE_TRY(add_call_refusals(config, f));
    MOE_TRY(add_gauge(config, "moe_rpc_upload_bytes",
                      "Bytes of messages that were announced and not handled yet.", &f->bytes));
    MOE_TRY(add_gauge(config, "moe_rpc_uploads_reading", "Messages over 1 MiB that are being read.",
                      &f->reading));
    MOE_TRY(add_gauge(config, "moe_rpc_uploads_waiting",
                      "Messages over 1 MiB that wait to be read.", &f->waiting));
    MOE_TRY(add_gauge(config, "moe_rpc_upload_oldest_seconds",
                      "How long the oldest message has waited to be read.", &f->oldest));
    for (int i = 0; i < MOE_RPC_REFUSALS; i++)
        MOE_TRY(moe_metrics_add_counter(
            config->metrics,
            &(struct moe_metric_desc){
                .name = "moe_rpc_uploads_refused_total",
                .help = "Messages that were refused before they were read, by reason.",
                .labels = {{"server", name_of(config)}, {"reason", reasons[i]}}},
            &f->refused[i]));
    return moe_ok();
}

static void tell(struct moe_rpc_figures *f, const struct moe_rpc_budget_use *use, uint64_t now)
{
    if (f->bytes == NULL)
        return;
    moe_gauge_set(f->bytes, (double)use->bytes);
    moe_gauge_set(f->reading, use->large);
    moe_gauge_set(f->waiting, use->waiting);
    moe_gauge_set(f->oldest, use->oldest_ns != 0 && now > use->oldest_ns
                                 ? (double)(now - use->oldest_ns) / (double)MOE_NS_PER_S
                                 : 0);
    for (int i = 0; i < MOE_RPC_REFUSALS; i++) {
        moe_counter_add(f->refused[i], use->refused[i] - f->reported[i]);
        f->reported[i] = use->refused[i];
    }
}

/* ------------------------------------------------------------------ checks */

/* The allocator keeps what was freed, so that messages cause no page faults. After a peak and some
 * quiet time, it gives that back. */
static void give_back(struct moe_rpc_memory *m, uint64_t peak, uint64_t now)
{
    if (peak >= PEAK_BYTES) {
        m->quiet_since_ns = now;
    } else if (m->quiet_since_ns != 0 && now >= m->quiet_since_ns + QUIET_NS) {
        m->quiet_since_ns = 0;
        (void)malloc_trim(0);
    }
}

uint64_t moe_rpc_memory_check(struct moe_rpc_memory *m)
{
    uint64_t now = moe_clock_ns();
    if (now < m->next_check_ns)
        return m->next_check_ns;
    const struct moe_rpc_budget_use use = moe_rpc_budget_use(&m->budget);
    const bool used = use.bytes > 0 || use.waiting > 0;
    m->next_check_ns = now + (used ? USED_EVERY_NS : CHECK_EVERY_NS);
    moe_rpc_budget_check(&m->budget, now);
    tell(&m->figures, &use, now);
    give_back(m, use.peak + use.open * STREAM_BYTES + use.connections * CONNECTION_BYTES, now);
    return m->next_check_ns;
}
