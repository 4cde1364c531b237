/* SPDX-License-Identifier: Apache-2.0 */
/* Counts the connections of each peer: of a name, or, without one, of an address. */
#include "listener/inside.h"

#include <stdlib.h>
#include <string.h>

struct moe_peer {
    LIST_ENTRY(moe_peer) link;
    uint32_t count, open; /* connections; the open ones of them */
    bool named;
    char key[]; /* name or address */
};

/* Any process of this host can use any of its loopback addresses. */
static const char *key_of(const struct moe_rpc_identity *who)
{
    if (who->name[0] != '\0')
        return who->name;
    bool loopback = strncmp(who->address, "127.", 4) == 0 || strcmp(who->address, "::1") == 0 ||
                    strncmp(who->address, "::ffff:127.", 11) == 0;
    return loopback ? "loopback" : who->address;
}

bool moe_peers_are_one(const struct moe_rpc_identity *a, const struct moe_rpc_identity *b)
{
    return (a->name[0] != '\0') == (b->name[0] != '\0') && strcmp(key_of(a), key_of(b)) == 0;
}

/* FNV-1a. A peer that fills one bucket needs many names or addresses; caps bound their number. */
static size_t bucket_of(const char *key)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (; *key != '\0'; key++)
        hash = (hash ^ (uint8_t)*key) * UINT64_C(0x100000001b3);
    return (size_t)((hash ^ hash >> 32) % MOE_PEER_BUCKETS);
}

static struct moe_peer *find(struct moe_peers *p, const struct moe_rpc_identity *who)
{
    struct moe_peer *peer;
    const char *key = key_of(who);
    LIST_FOREACH(peer, &p->buckets[bucket_of(key)], link)
    if (peer->named == (who->name[0] != '\0') && strcmp(peer->key, key) == 0)
        break;
    return peer;
}

bool moe_peers_enter(struct moe_peers *p, const struct moe_rpc_identity *who, uint32_t limit)
{
    struct moe_peer *peer = find(p, who);
    if (peer == NULL) {
        const char *key = key_of(who);
        size_t length = strlen(key) + 1;
        peer = calloc(1, sizeof *peer + length);
        if (peer == NULL)
            return false;
        peer->named = who->name[0] != '\0';
        memcpy(peer->key, key, length);
        LIST_INSERT_HEAD(&p->buckets[bucket_of(key)], peer, link);
    }
    if (peer->count >= limit)
        return false;
    peer->count++;
    return true;
}

bool moe_peers_open(struct moe_peers *p, const struct moe_rpc_identity *who, uint32_t limit)
{
    struct moe_peer *peer = find(p, who);
    MOE_INVARIANT(peer != NULL && peer->count > peer->open);
    if (peer->open >= limit)
        return false;
    peer->open++;
    return true;
}

void moe_peers_leave(struct moe_peers *p, const struct moe_rpc_identity *who, bool open)
{
    struct moe_peer *peer = find(p, who);
    MOE_INVARIANT(peer != NULL && peer->count > 0);
    peer->open -= open;
    if (--peer->count > 0)
        return;
    LIST_REMOVE(peer, link);
    free(peer);
}
