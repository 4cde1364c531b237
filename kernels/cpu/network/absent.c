/* SPDX-License-Identifier: Apache-2.0 */
/* A build without UCX has no network: sessions of several hosts are refused by name. */
#include "cpu/network/network.h"

bool moe_cpu_network_built(void)
{
    return false;
}

static struct moe_status absent(void)
{
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                     "this build has no network transport");
}

struct moe_status moe_cpu_network_open(const struct moe_cpu_network_config *config,
                                       struct moe_cpu_network **out,
                                       struct moe_cpu_network_endpoint *endpoint)
{
    (void)config;
    (void)endpoint;
    *out = NULL;
    return absent();
}

struct moe_status moe_cpu_network_connect(struct moe_cpu_network *n, uint64_t peers,
                                          const struct moe_cpu_network_endpoint *endpoints,
                                          uint64_t deadline_ns)
{
    (void)n;
    (void)peers;
    (void)endpoints;
    (void)deadline_ns;
    return absent();
}

void moe_cpu_network_help(struct moe_cpu_network *n)
{
    (void)n;
}

void moe_cpu_network_stop_helping(struct moe_cpu_network *n)
{
    (void)n;
}

void moe_cpu_network_notify(struct moe_cpu_network *n, uint64_t epoch, uint64_t lost)
{
    (void)n;
    (void)epoch;
    (void)lost;
}

void moe_cpu_network_keep(struct moe_cpu_network *n, uint64_t live)
{
    (void)n;
    (void)live;
}

void moe_cpu_network_close(struct moe_cpu_network *n)
{
    (void)n;
}

struct moe_cpu_message *moe_cpu_network_take(struct moe_cpu_network *n, uint32_t slot)
{
    (void)n;
    (void)slot;
    return NULL;
}

void *moe_cpu_message_store(struct moe_cpu_message *m, size_t offset, size_t bytes)
{
    (void)m;
    (void)offset;
    (void)bytes;
    return NULL;
}

bool moe_cpu_message_flag(struct moe_cpu_message *m, size_t offset, uint64_t flag)
{
    (void)m;
    (void)offset;
    (void)flag;
    return false;
}

void moe_cpu_network_send(struct moe_cpu_network *n, struct moe_cpu_message *m)
{
    (void)n;
    (void)m;
}
