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
    enum { NEVER_INDEXED = 0x10, DIGITS_MAX = 8, DIGIT_BITS = 4 };
    static const char digits[] = "0123456789abcdef";
    const char *name = moe_rpc_upload_field_name();
    size_t name_length = strlen(name), value_length = 1;
    while (value_length < DIGITS_MAX && stream >> (DIGIT_BITS * value_length) != 0)
        value_length++;
    uint8_t *at = to;
    *at++ = NEVER_INDEXED;
    *at++ = (uint8_t)name_length;
    memcpy(at, name, name_length);
    at += name_length;
    *at++ = (uint8_t)value_length;
    for (size_t left = value_length; left-- > 0;)
        *at++ = (uint8_t)digits[stream >> (DIGIT_BITS * left) & 0xf];
    return (size_t)(at - to);
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

/* The owner of this process may use all of it. */
static bool pays_alone(const struct moe_rpc_identity *who)
{
    return who->name[0] == '\0' || (who->link == MOE_RPC_LINK_UNIX && who->uid == geteuid());
}

static struct moe_rpc_payer *find_payer(struct moe_rpc_budget *b,
                                        const struct moe_rpc_identity *who) MOE_REQUIRES(b->lock)
{
    struct moe_rpc_payer *p;
    if (pays_alone(who))
        return NULL;
    LIST_FOREACH(p, &b->payers, link)
    if (p->kind == who->link && strcmp(p->name, who->name) == 0)
        return p;
    return NULL;
}

/* `u` joins the payer of `who`, which is `spare` if there is none yet. False if it is not used. */
static bool join_payer(struct moe_rpc_budget *b, struct moe_rpc_uploads *u,
                       const struct moe_rpc_identity *who, struct moe_rpc_payer *spare)
    MOE_REQUIRES(b->lock)
{
    struct moe_rpc_payer *found = find_payer(b, who);
    u->payer = found != NULL ? found : spare;
    if (found == NULL && !pays_alone(who)) {
        spare->named = true;
        spare->kind = who->link;
        memcpy(spare->name, who->name, sizeof spare->name);
        LIST_INSERT_HEAD(&b->payers, spare, link);
    }
    u->payer->connections++;
    LIST_INSERT_HEAD(&u->payer->members, u, member);
    return found == NULL;
}

struct moe_status moe_rpc_uploads_open(struct moe_rpc_budget *b, const struct moe_rpc_identity *who,
                                       void *connection, struct moe_rpc_uploads **out)
{
    *out = NULL;
    struct moe_rpc_uploads *u = calloc(1, sizeof *u);
    struct moe_rpc_payer *spare = calloc(1, sizeof *spare);
    if (u == NULL || spare == NULL) {
        free(u);
        free(spare);
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "connection");
    }
    u->budget = b;
    u->connection = connection;
    u->references = 1;
    moe_mutex_lock(&b->lock);
    b->connections++;
    const bool used = join_payer(b, u, who, spare);
    moe_mutex_unlock(&b->lock);
    if (!used)
        free(spare);
    *out = u;
    return moe_ok();
}

static void drop_connection(struct moe_rpc_budget *b, struct moe_rpc_uploads *u)
    MOE_REQUIRES(b->lock)
{
    struct moe_rpc_payer *payer = u->payer;
    if (--u->references > 0)
        return;
    b->connections--;
    LIST_REMOVE(u, member);
    if (--payer->connections == 0) {
        if (payer->named)
            LIST_REMOVE(payer, link);
        free(payer);
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

/* What a call that asks may do now: MOE_RPC_READ, a refusal, or WAIT. */
enum { WAIT = MOE_RPC_READ + 1 };

static int decide(const struct moe_rpc_upload *up)
{
    const bool is_next = up->begun == up->read + 1;
    if (up->too_large_at != 0 && up->too_large_at <= up->read + 1)
        return MOE_RPC_TOO_LARGE;
    if (!up->listed)
        return MOE_RPC_READ; /* the end */
    if (up->refused)
        return MOE_RPC_QUEUE_FULL;
    if (up->begun == up->read)
        return up->half_closed ? MOE_RPC_READ : WAIT;
    /* A message that others follow has come in whole, so it was small, or has been read. */
    return is_next && up->in_line ? WAIT : MOE_RPC_READ;
}

/* Something has changed for a call that may have asked. */
static void review(struct moe_rpc_budget *b, struct moe_rpc_upload *up, struct moe_rpc_woken *woken)
    MOE_REQUIRES(b->lock)
{
    const int answer = up->waits ? decide(up) : WAIT;
    if (answer == WAIT)
        return;
    if (answer == MOE_RPC_READ) {
        moe_rpc__let_read(b, up);
    } else {
        up->waits = false;
        moe_rpc__refuse(b, (enum moe_rpc_refusal)answer);
    }
    moe_rpc__answer(b, up, answer, woken);
}

static void unlist(struct moe_rpc_budget *b, struct moe_rpc_upload *up, struct moe_rpc_woken *woken)
    MOE_REQUIRES(b->lock)
{
    LIST_REMOVE(up, link);
    moe_rpc__remove_stream(b, up->of);
    up->listed = false;
    moe_rpc__leave_line(b, up);
    review(b, up, woken);
    drop_upload(b, up);
}

void moe_rpc_uploads_close(struct moe_rpc_uploads *u)
{
    struct moe_rpc_budget *b = u->budget;
    bool more = true;
    while (more) {
        struct moe_rpc_woken woken = {.count = 0};
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
}

void moe_rpc_uploads_free(struct moe_rpc_uploads *u)
{
    struct moe_rpc_budget *b = u->budget;
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
    up->largest = UINT64_MAX;
    moe_mutex_lock(&b->lock);
    u->references++;
    moe_rpc__add_stream(b, u);
    LIST_INSERT_HEAD(&u->streams[(stream >> 1) % MOE_RPC_UPLOAD_BUCKETS], up, link);
    moe_mutex_unlock(&b->lock);
    return put_field(stream, field);
}

/* The prefix of a message is here. */
static void message_begun(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t now_ns,
                          struct moe_rpc_woken *woken) MOE_REQUIRES(b->lock)
{
    const uint8_t *p = up->prefix;
    up->left = (uint64_t)p[1] << 24 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 8 | p[4];
    up->length = up->left + sizeof up->prefix;
    up->longest = up->length > up->longest ? up->length : up->longest;
    up->prefix_length = 0;
    up->begun++;
    if (up->too_large_at == 0 && up->length - sizeof up->prefix > up->largest)
        up->too_large_at = up->begun;
    /* One that is already in line: its client has broken its window. */
    if (up->begun - up->read > UNREAD_MAX || up->in_line ||
        (up->length <= MOE_RPC_LOOKAHEAD_BYTES ? !moe_rpc__charge_small(b, up, up->length)
                                               : !moe_rpc__join_line(b, up, now_ns, woken)))
        up->refused = true;
    review(b, up, woken);
}

uint32_t moe_rpc_upload_data(struct moe_rpc_uploads *u, uint32_t stream, const uint8_t *bytes,
                             size_t length, uint64_t now_ns)
{
    struct moe_rpc_budget *b = u->budget;
    uint32_t small = 0;
    struct moe_rpc_woken woken = {.count = 0};
    moe_mutex_lock(&b->lock);
    struct moe_rpc_upload *up = find(u, stream);
    if (up != NULL)
        up->bytes += length;
    while (up != NULL && length > 0 && !up->refused) {
        if (up->left > 0) {
            size_t some = length < up->left ? length : (size_t)up->left;
            const bool was_filled = moe_rpc__is_filled(up);
            up->left -= some;
            bytes += some;
            length -= some;
            if (up->in_line && !was_filled && moe_rpc__is_filled(up))
                moe_rpc__grant_line(b, &woken);
            continue;
        }
        up->prefix[up->prefix_length++] = *bytes++;
        length--;
        if (up->prefix_length < sizeof up->prefix)
            continue;
        message_begun(b, up, now_ns, &woken);
        small += up->length < sizeof up->prefix + MOE_RPC_UPLOAD_SMALL;
    }
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
    return small;
}

void moe_rpc_upload_half_close(struct moe_rpc_uploads *u, uint32_t stream)
{
    struct moe_rpc_budget *b = u->budget;
    struct moe_rpc_woken woken = {.count = 0};
    moe_mutex_lock(&b->lock);
    struct moe_rpc_upload *up = find(u, stream);
    if (up != NULL) {
        up->half_closed = true;
        review(b, up, &woken);
    }
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

void moe_rpc_upload_end(struct moe_rpc_uploads *u, uint32_t stream)
{
    struct moe_rpc_budget *b = u->budget;
    struct moe_rpc_woken woken = {.count = 0};
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
                                           size_t length, void *waiter, uint64_t largest)
{
    struct moe_rpc_budget *b = u->budget;
    moe_mutex_lock(&b->lock);
    struct moe_rpc_upload *up = find(u, get_stream(value, length));
    if (up != NULL) {
        up->references++;
        up->waiter = waiter;
        up->largest = largest;
        if (up->longest > sizeof up->prefix && up->longest - sizeof up->prefix > largest)
            up->too_large_at = 1;
    }
    moe_mutex_unlock(&b->lock);
    return up;
}

void moe_rpc_upload_release(struct moe_rpc_upload *up)
{
    struct moe_rpc_budget *b = up->of->budget;
    struct moe_rpc_woken woken = {.count = 0};
    moe_mutex_lock(&b->lock);
    up->waiter = NULL;
    up->waits = false;
    up->refused = true; /* what still comes is dropped by the core */
    moe_rpc__stop_reading(b, up);
    moe_rpc__leave_line(b, up);
    moe_rpc__give_back_small(b, up, up->charged[MOE_RPC_SMALL]);
    moe_rpc__give_back_large(b, up);
    drop_upload(b, up);
    moe_rpc__grant_line(b, &woken);
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

struct moe_status moe_rpc_upload_next(struct moe_rpc_upload *up, bool *now)
{
    struct moe_rpc_budget *b = up->of->budget;
    struct moe_rpc_woken woken = {.asker = up};
    struct moe_status st = moe_ok();
    moe_mutex_lock(&b->lock);
    const int answer = decide(up);
    *now = answer == MOE_RPC_READ;
    if (*now) {
        moe_rpc__let_read(b, up);
    } else if (answer == WAIT) {
        up->waits = true;
        moe_rpc__grant_line(b, &woken);
        *now = up->reads;
    } else {
        moe_rpc__refuse(b, (enum moe_rpc_refusal)answer);
        st = moe_rpc__refusal((enum moe_rpc_refusal)answer, moe_rpc__retry_ms(b),
                              up->length - sizeof up->prefix, up->largest);
    }
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
    return st;
}

bool moe_rpc_upload_forget(struct moe_rpc_upload *up)
{
    struct moe_rpc_budget *b = up->of->budget;
    struct moe_rpc_woken woken = {.count = 0};
    moe_mutex_lock(&b->lock);
    const bool forgotten = !up->reads;
    up->waits = false;
    moe_rpc__leave_line(b, up);
    moe_rpc__grant_line(b, &woken); /* its bytes may have kept others waiting */
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
    return forgotten;
}

bool moe_rpc_upload_has_begun(struct moe_rpc_upload *up)
{
    struct moe_rpc_budget *b = up->of->budget;
    moe_mutex_lock(&b->lock);
    const bool begun = up->begun > 0;
    moe_mutex_unlock(&b->lock);
    return begun;
}

void moe_rpc_upload_delivered(struct moe_rpc_upload *up, uint64_t length)
{
    struct moe_rpc_budget *b = up->of->budget;
    struct moe_rpc_woken woken = {.count = 0};
    moe_mutex_lock(&b->lock);
    up->read++;
    moe_rpc__stop_reading(b, up);
    if (up->charged[MOE_RPC_LARGE] > 0)
        moe_rpc__give_back_large(b, up);
    else
        moe_rpc__give_back_small(b, up, length + sizeof up->prefix);
    moe_rpc__grant_line(b, &woken);
    moe_mutex_unlock(&b->lock);
    moe_rpc__wake(b, &woken);
}

/* ------------------------------------------------------------------ rate */

/* True if the message that is read comes in fast enough. The first check begins its time. */
static bool is_fast(struct moe_rpc_upload *up, uint64_t now_ns)
{
    const int64_t most = 5 * (int64_t)MOE_NS_PER_S;
    const uint64_t enough = 2 * (uint64_t)MOE_RPC_LEAST_RATE * 5; /* more changes nothing */
    const uint64_t longest = 2 * MOE_NS_PER_S; /* a late check is not the client's fault */
    uint64_t passed = now_ns - up->rate.checked_ns, come = up->bytes - up->rate.bytes;
    if (up->rate.checked_ns == 0) {
        up->rate.credit_ns = (int64_t)MOE_NS_PER_S;
        passed = come = 0;
    }
    passed = passed < longest ? passed : longest;
    come = come < enough ? come : enough;
    up->rate.credit_ns += (int64_t)(come * MOE_NS_PER_S / MOE_RPC_LEAST_RATE) - (int64_t)passed;
    if (up->rate.credit_ns > most)
        up->rate.credit_ns = most;
    up->rate.checked_ns = now_ns;
    up->rate.bytes = up->bytes;
    return up->rate.credit_ns >= 0;
}

/* Fails the call of `up` if its client is too slow. */
static void check_rate(struct moe_rpc_budget *b, struct moe_rpc_upload *up, uint64_t now_ns,
                       struct moe_rpc_woken *woken) MOE_REQUIRES(b->lock)
{
    if (up->slow || up->waiter == NULL || !up->listed || is_fast(up, now_ns))
        return;
    up->slow = true;
    up->waits = false;
    moe_rpc__refuse(b, MOE_RPC_TOO_SLOW);
    moe_rpc__answer(b, up, MOE_RPC_TOO_SLOW, woken);
}

/* True if some have not been looked at. */
static bool check_some(struct moe_rpc_budget *b, uint64_t now_ns, struct moe_rpc_woken *woken)
    MOE_REQUIRES(b->lock)
{
    struct moe_rpc_upload *up;
    TAILQ_FOREACH(up, &b->reading, reading)
    {
        const bool whole = up->begun != up->read + 1 || up->left == 0;
        if (!whole && woken->count < MOE_RPC_WOKEN_MAX)
            check_rate(b, up, now_ns, woken);
    }
    TAILQ_FOREACH(up, &b->line, line)
    if (!moe_rpc__is_filled(up) && woken->count < MOE_RPC_WOKEN_MAX)
        check_rate(b, up, now_ns, woken);
    return woken->count == MOE_RPC_WOKEN_MAX;
}

void moe_rpc_budget_check(struct moe_rpc_budget *b, uint64_t now_ns)
{
    bool more = true;
    while (more) {
        struct moe_rpc_woken woken = {.count = 0};
        moe_mutex_lock(&b->lock);
        more = check_some(b, now_ns, &woken);
        b->peak = b->all.bytes[MOE_RPC_SMALL] + b->all.bytes[MOE_RPC_LARGE];
        moe_mutex_unlock(&b->lock);
        moe_rpc__wake(b, &woken);
    }
}
