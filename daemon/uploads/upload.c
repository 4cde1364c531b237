/* SPDX-License-Identifier: Apache-2.0 */
/* Streams of a connection: prefixes of their messages, and what calls may read. */
#include "uploads/upload.h"

#include "base/clock.h"
#include "base/random.h"
#include "uploads/state.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Messages of one stream that begin before the call reads them. */
enum { UNREAD_MAX = 16384 };

/* ------------------------------------------------------------------ the field */

static char field_name[MOE_RPC_UPLOAD_NAME_BYTES]; /* written once */
static struct moe_status field_made;

static void make_field_name(void)
{
    uint64_t a = 0, b = 0;
    field_made = moe_random_id(&a);
    if (!moe_failed(&field_made))
        field_made = moe_random_id(&b);
    (void)snprintf(field_name, sizeof field_name, "moe-%016" PRIx64 "%016" PRIx64, a, b);
}

struct moe_status moe_rpc_upload_prepare(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, make_field_name);
    return field_made;
}

const char *moe_rpc_upload_field_name(void)
{
    return field_name;
}

/* RFC 7541 6.2.3, a literal that is never indexed, with a new name. Both lengths are below 127, so
 * each is one byte; no Huffman coding. */
static size_t put_field(uint32_t stream, uint8_t *to)
{
    enum { NEVER_INDEXED = 0x10 };
    char value[9];
    const char *name = moe_rpc_upload_field_name();
    size_t name_length = strlen(name);
    size_t value_length = (size_t)snprintf(value, sizeof value, "%" PRIx32, stream);
    uint8_t *at = to;
    *at++ = NEVER_INDEXED;
    *at++ = (uint8_t)name_length;
    memcpy(at, name, name_length);
    at += name_length;
    *at++ = (uint8_t)value_length;
    memcpy(at, value, value_length);
    return (size_t)(at + value_length - to);
}

/* 0, which is no client's stream, if `value` is no such number. */
static uint32_t get_stream(const uint8_t *value, size_t length)
{
    uint32_t stream = 0;
    if (length == 0 || length > 8)
        return 0;
    for (size_t i = 0; i < length; i++) {
        uint8_t c = value[i];
        if (c >= '0' && c <= '9')
            stream = stream << 4 | (uint32_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            stream = stream << 4 | (uint32_t)(c - 'a' + 10);
        else
            return 0;
    }
    return stream;
}

/* ------------------------------------------------------------------ connections */

static struct moe_rpc_payer *find_payer(struct moe_rpc_budget *b,
                                        const struct moe_rpc_identity *who) MOE_REQUIRES(b->lock)
{
    struct moe_rpc_payer *p;
    LIST_FOREACH(p, &b->payers, link)
    if (p->kind == who->link && strcmp(p->name, who->name) == 0)
        return p;
    return NULL;
}

/* The owner of this process may use all of it. */
static bool pays(const struct moe_rpc_identity *who)
{
    return who->name[0] != '\0' && !(who->link == MOE_RPC_LINK_UNIX && who->uid == geteuid());
}

struct moe_status moe_rpc_uploads_open(struct moe_rpc_budget *b, const struct moe_rpc_identity *who,
                                       struct moe_rpc_uploads **out)
{
    *out = NULL;
    struct moe_rpc_uploads *u = calloc(1, sizeof *u);
    struct moe_rpc_payer *spare = pays(who) ? calloc(1, sizeof *spare) : NULL;
    if (u == NULL || (spare == NULL && pays(who))) {
        free(u);
        free(spare);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "connection");
    }
    u->budget = b;
    u->references = 1;
    if (spare != NULL) {
        moe_mutex_lock(&b->lock);
        u->payer = find_payer(b, who);
        if (u->payer == NULL) {
            u->payer = spare;
            spare->kind = who->link;
            memcpy(spare->name, who->name, sizeof spare->name);
            LIST_INSERT_HEAD(&b->payers, spare, link);
            spare = NULL;
        }
        u->payer->connections++;
        moe_mutex_unlock(&b->lock);
        free(spare);
    }
    *out = u;
    return moe_ok();
}

static void drop_connection(struct moe_rpc_budget *b, struct moe_rpc_uploads *u)
    MOE_REQUIRES(b->lock)
{
    (void)b; /* its lock is held */
    if (--u->references > 0)
        return;
    if (u->payer != NULL && --u->payer->connections == 0) {
        LIST_REMOVE(u->payer, link);
        free(u->payer);
    }
    free(u);
}

/* ------------------------------------------------------------------ streams */

static struct moe_rpc_upload *find(const struct moe_rpc_uploads *u, uint32_t stream)
{
    struct moe_rpc_upload *up;
    LIST_FOREACH(up, &u->streams[(stream >> 1) % MOE_RPC_UPLOAD_BUCKETS], link)
    if (up->stream == stream)
        return up;
    return NULL;
}

static void drop_upload(struct moe_rpc_budget *b, struct moe_rpc_upload *up) MOE_REQUIRES(b->lock)
{
    if (--up->references > 0)
        return;
    moe_rpc__give_back_small(b, up, up->charged[MOE_RPC_SMALL]);
    moe_rpc__give_back_large(b, up);
    drop_connection(b, up->of);
    free(up);
}

static void unlist(struct moe_rpc_budget *b, struct moe_rpc_upload *up, struct moe_rpc_woken *woken)
    MOE_REQUIRES(b->lock)
{
    LIST_REMOVE(up, link);
    up->listed = false;
    up->half_closed = true; /* a call that waits for a message reads the end instead */
    moe_rpc__leave_line(b, up);
    moe_rpc__take_waiter(b, up, woken);
    drop_upload(b, up);
}

void moe_rpc_uploads_close(struct moe_rpc_uploads *u)
{
    struct moe_rpc_budget *b = u->budget;
    bool more = true;
    while (more) {
        struct moe_rpc_woken woken = {0};
        moe_mutex_lock(&b->lock);
        for (size_t i = 0; i < MOE_RPC_UPLOAD_BUCKETS; i++)
            while (!LIST_EMPTY(&u->streams[i]) && woken.count < MOE_RPC_WOKEN_MAX)
                unlist(b, LIST_FIRST(&u->streams[i]), &woken);
        more = woken.count == MOE_RPC_WOKEN_MAX;
        if (!more)
            moe_rpc__grant_line(b, &woken);
        moe_mutex_unlock(&b->lock);
        moe_rpc__wake(b, &woken);
    }
    moe_mutex_lock(&b->lock);
    drop_connection(b, u);
    moe_mutex_unlock(&b->lock);
}

size_t moe_rpc_upload_begin(struct moe_rpc_uploads *u, uint32_t stream, uint8_t *field)
{
    struct moe_rpc_budget *b = u->budget;
    struct moe_rpc_upload *up = calloc(1, sizeof *up);
    if (up == NULL)
        return 0;
    up->of = u;
    up->stream = stream;
    up->references = 1;
    up->listed = true;
    moe_mutex_lock(&b->lock);
    u->references++;
    LIST_INSERT_HEAD(&u->streams[(stream >> 1) % MOE_RPC_UPLOAD_BUCKETS], up, link);
    moe_mutex_unlock(&b->lock);
    return put_field(stream, field);
}

/* The prefix of a message is here. */
static void message_begun(struct moe_rpc_budget *b, struct moe_rpc_upload *up,
                          struct moe_rpc_woken *woken) MOE_REQUIRES(b->lock)
{
    const uint8_t *p = up->prefix;
    up->left = (uint64_t)p[1] << 24 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 8 | p[4];
    up->length = up->left + sizeof up->prefix;
    up->prefix_length = 0;
    up->begun++;
    if (up->begun - up->read > UNREAD_MAX ||
        (up->length <= MOE_RPC_LOOKAHEAD_BYTES && !moe_rpc__charge_small(b, up, up->length)))
        up->refused = true;
    moe_rpc__take_waiter(b, up, woken);
}

void moe_rpc_upload_data(struct moe_rpc_uploads *u, uint32_t stream, const uint8_t *bytes,
                         size_t length)
{
    struct moe_rpc_budget *b = u->budget;
    struct moe_rpc_woken woken = {0};
    moe_mutex_lock(&b->lock);
    struct moe_rpc_upload *up = find(u, stream);
    if (up != NULL)
        up->bytes += length;
    while (up != NULL && length > 0 && !up->refused) {
        if (up->left > 0) {
            size_t some = length < up->left ? length : (size_t)up->left;
            up->left -= some;
            bytes += some;
            length -= some;
            continue;
        }
        up->prefix[up->prefix_length++] = *bytes++;
        length--;
        if (up->prefix_length == sizeof up->prefix)
            message_begun(b, up, &woken);
    }
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

void moe_rpc_upload_half_close(struct moe_rpc_uploads *u, uint32_t stream)
{
    struct moe_rpc_budget *b = u->budget;
    struct moe_rpc_woken woken = {0};
    moe_mutex_lock(&b->lock);
    struct moe_rpc_upload *up = find(u, stream);
    if (up != NULL) {
        up->half_closed = true;
        if (!up->in_line)
            moe_rpc__take_waiter(b, up, &woken);
    }
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

void moe_rpc_upload_end(struct moe_rpc_uploads *u, uint32_t stream)
{
    struct moe_rpc_budget *b = u->budget;
    struct moe_rpc_woken woken = {0};
    moe_mutex_lock(&b->lock);
    struct moe_rpc_upload *up = find(u, stream);
    if (up != NULL) {
        unlist(b, up, &woken);
        moe_rpc__grant_line(b, &woken);
    }
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

/* ------------------------------------------------------------------ calls */

struct moe_rpc_upload *moe_rpc_upload_find(struct moe_rpc_uploads *u, const uint8_t *value,
                                           size_t length)
{
    struct moe_rpc_budget *b = u->budget;
    moe_mutex_lock(&b->lock);
    struct moe_rpc_upload *up = find(u, get_stream(value, length));
    if (up != NULL)
        up->references++;
    moe_mutex_unlock(&b->lock);
    return up;
}

void moe_rpc_upload_release(struct moe_rpc_upload *up)
{
    struct moe_rpc_budget *b = up->of->budget;
    struct moe_rpc_woken woken = {0};
    moe_mutex_lock(&b->lock);
    up->waiter = NULL;
    moe_rpc__leave_line(b, up);
    moe_rpc__give_back_small(b, up, up->charged[MOE_RPC_SMALL]);
    moe_rpc__give_back_large(b, up);
    drop_upload(b, up);
    moe_rpc__grant_line(b, &woken);
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

/* The next message is the last one that has begun, is longer than the look-ahead, and has no bytes
 * yet. (One that others follow has come in whole, so it was small, or has been read.) */
static bool is_large(const struct moe_rpc_upload *up)
{
    return up->begun == up->read + 1 && up->length > MOE_RPC_LOOKAHEAD_BYTES;
}

static struct moe_status decide(struct moe_rpc_budget *b, struct moe_rpc_upload *up,
                                uint64_t largest, uint64_t now_ns, struct moe_rpc_woken *woken,
                                bool *now) MOE_REQUIRES(b->lock)
{
    *now = true;
    if (up->charged[MOE_RPC_LARGE] > 0)
        return moe_ok();
    if (up->refused)
        return moe_rpc__refused_small(b);
    if (up->begun == up->read) {
        *now = up->half_closed;
        return moe_ok();
    }
    if (up->begun == up->read + 1 && up->length - sizeof up->prefix > largest)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_TOO_LARGE,
                         "the message has %" PRIu64 " bytes; at most %" PRIu64 " are allowed",
                         up->length - sizeof up->prefix, largest);
    if (!is_large(up))
        return moe_ok();
    if (!up->in_line && up->listed)
        MOE_TRY(moe_rpc__enter_line(b, up, now_ns, woken));
    *now = up->charged[MOE_RPC_LARGE] > 0 || !up->listed;
    return moe_ok();
}

struct moe_status moe_rpc_upload_next(struct moe_rpc_upload *up, void *waiter, uint64_t largest,
                                      uint64_t now_ns, bool *now)
{
    struct moe_rpc_budget *b = up->of->budget;
    struct moe_rpc_woken woken = {0};
    moe_mutex_lock(&b->lock);
    struct moe_status st = decide(b, up, largest, now_ns, &woken, now);
    *now = *now && !moe_failed(&st);
    up->waiter = moe_failed(&st) || *now ? NULL : waiter;
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
    return st;
}

void moe_rpc_upload_forget(struct moe_rpc_upload *up)
{
    struct moe_rpc_budget *b = up->of->budget;
    struct moe_rpc_woken woken = {0};
    moe_mutex_lock(&b->lock);
    up->waiter = NULL;
    moe_rpc__leave_line(b, up);
    moe_rpc__grant_line(b, &woken); /* its bytes may have kept others waiting */
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

void moe_rpc_upload_delivered(struct moe_rpc_upload *up, uint64_t length)
{
    struct moe_rpc_budget *b = up->of->budget;
    struct moe_rpc_woken woken = {0};
    moe_mutex_lock(&b->lock);
    up->read++;
    if (up->charged[MOE_RPC_LARGE] > 0)
        moe_rpc__give_back_large(b, up);
    else
        moe_rpc__give_back_small(b, up, length + sizeof up->prefix);
    moe_rpc__grant_line(b, &woken);
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

/* ------------------------------------------------------------------ rate */

static uint64_t bytes_of(struct moe_rpc_upload *up)
{
    struct moe_rpc_budget *b = up->of->budget;
    moe_mutex_lock(&b->lock);
    uint64_t bytes = up->bytes;
    moe_mutex_unlock(&b->lock);
    return bytes;
}

void moe_rpc_rate_start(struct moe_rpc_rate *rate, struct moe_rpc_upload *up, uint64_t now_ns)
{
    *rate = (struct moe_rpc_rate){
        .checked_ns = now_ns, .bytes = bytes_of(up), .credit_ns = (int64_t)MOE_NS_PER_S};
}

bool moe_rpc_rate_check(struct moe_rpc_rate *rate, struct moe_rpc_upload *up, uint64_t now_ns)
{
    const int64_t most = 5 * (int64_t)MOE_NS_PER_S;
    uint64_t bytes = bytes_of(up), come = bytes - rate->bytes;
    uint64_t enough = 2 * (uint64_t)MOE_RPC_LEAST_RATE * 5; /* more changes nothing */
    int64_t paid = (int64_t)((come < enough ? come : enough) * MOE_NS_PER_S / MOE_RPC_LEAST_RATE);
    rate->credit_ns += paid - (int64_t)(now_ns - rate->checked_ns);
    if (rate->credit_ns > most)
        rate->credit_ns = most;
    rate->checked_ns = now_ns;
    rate->bytes = bytes;
    return rate->credit_ns >= 0;
}
