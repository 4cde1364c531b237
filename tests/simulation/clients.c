/* SPDX-License-Identifier: Apache-2.0 */
/* Callers. Each wants one thing done at a time and asks until it is answered: at any slot, again
 * when an answer is late, and sometimes when it has one already. */
#include "simulation/world.h"

#include <string.h>

static struct event *to_client(struct world *w, enum event_kind kind, uint32_t client)
{
    struct event *e = new_event(w, kind, client);
    e->number = w->clients[client].attempt;
    return e;
}

static void think(struct world *w, uint32_t client)
{
    uint64_t pause = 1 + rnd(w, w->clients[client].thinking);
    post(w, to_client(w, E_THINK, client), pause);
}

void start_clients(struct world *w)
{
    for (uint32_t i = 0; i < CLIENTS; i++) {
        struct client *c = &w->clients[i];
        c->next_backward = 1;
        c->session = i;
        c->thinking = 6 + (uint32_t)rnd(w, 12);
        post(w, to_client(w, E_THINK, i), 30 + rnd(w, 60));
    }
}

/* ------------------------------------------------------------------------ operations */

static enum op_kind choose_kind(struct world *w)
{
    static const uint32_t weights[OP_KINDS] = {
        [OP_FORWARD] = 30, [OP_BACKWARD] = 14, [OP_STEP] = 22, [OP_ZERO] = 6,
        [OP_SAVE] = 20,    [OP_LOAD] = 4,      [OP_EXPORT] = 4};
    uint64_t at = rnd(w, 100);
    uint32_t kind = 0;
    for (; kind < OP_KINDS - 1 && at >= weights[kind]; kind++)
        at -= weights[kind];
    return (enum op_kind)kind;
}

static void fill_op(struct world *w, struct op *op, uint16_t number, uint32_t client)
{
    struct client *c = &w->clients[client];
    op->kind = choose_kind(w);
    op->client = client;
    op->lineage = chance(w, 900) ? c->lineage : 0;
    op->content.header_hash[0] = number;
    op->tokens = 1 + (uint32_t)rnd(w, 40);
    op->name = 1 + (uint32_t)rnd(w, NAMES - 1);
    op->tidies = chance(w, 800);
    if (op->kind == OP_BACKWARD) {
        op->tokens = 1 + (uint32_t)rnd(w, BUCKET);
        op->id = c->next_backward++;
    } else if (op->kind != OP_FORWARD) {
        /* Sometimes one that somebody else has used, or is about to use. */
        op->id = chance(w, 60) && w->last_id > 3 ? w->last_id - rnd(w, 3) : ++w->last_id;
    }
}

/* An old one again, or a new one. */
static bool choose_op(struct world *w, uint32_t client)
{
    struct client *c = &w->clients[client];
    bool again = c->op != 0 && chance(w, 120);
    for (int tries = 0; again && tries < 10; tries++) {
        uint32_t back = 1 + (uint32_t)rnd(w, w->op_count - 1);
        if (w->ops[back].client != client || w->ops[back].kind == OP_FORWARD)
            continue;
        c->op = (uint16_t)back;
        if (w->ops[back].kind == OP_BACKWARD && chance(w, 500))
            w->ops[back].lineage = c->lineage; /* its gradients may be lost: sent again */
        return true;
    }
    if (w->quiet || w->op_count == OPS_MAX)
        return false;
    c->op = (uint16_t)w->op_count++;
    fill_op(w, &w->ops[c->op], c->op, client);
    return true;
}

static void ask(struct world *w, uint32_t client)
{
    struct client *c = &w->clients[client];
    c->attempt++;
    c->slot = (uint32_t)rnd(w, w->slot_count);
    c->waits = true;
    struct event *e = new_event(w, E_ASKED, c->slot);
    e->op = c->op;
    e->number = c->attempt;
    e->from = client;
    post(w, e, 1 + rnd(w, 5));
    post(w, to_client(w, E_TIMEOUT, client), chance(w, 150) ? 5 + rnd(w, 60) : 400);
}

/* ---------------------------------------------------------------------------- answers */

static void check_answer(struct world *w, struct op *op, const struct event *e)
{
    const struct answer *a = &e->u.answer;
    w->totals.answers++;
    if (op->kind == OP_FORWARD) {
        op->answered = true;
        return;
    }
    if (op->answered && op->done_lineage == a->lineage) {
        w->totals.repeats++;
        check(w, op->done_version == a->version && op->done_steps == a->steps,
              "a repeat gets the answer of the first time");
    }
    op->answered = true;
    op->done_lineage = a->lineage;
    op->done_version = a->version;
    op->done_steps = a->steps;
}

static bool is_final(enum moe_code code)
{
    switch (code) {
    case MOE_OK:
    case MOE_ALREADY_EXISTS:
    case MOE_FAILED_PRECONDITION:
    case MOE_NOT_FOUND:
    case MOE_INVALID_ARGUMENT: return true;
    default: return false;
    }
}

static void finish(struct world *w, uint32_t client)
{
    w->clients[client].busy = w->clients[client].waits = false;
    think(w, client);
}

static void receive_answer(struct world *w, uint32_t client, const struct event *e)
{
    struct client *c = &w->clients[client];
    const struct answer *a = &e->u.answer;
    if (!c->waits)
        return;
    c->waits = false;
    if (a->code == MOE_OK)
        check_answer(w, &w->ops[c->op], e);
    if (a->reason == MOE_REASON_STATE_LOST || a->reason == MOE_REASON_GRADIENTS_LOST ||
        (a->code == MOE_OK && w->ops[c->op].kind != OP_FORWARD))
        c->lineage = a->lineage;
    if (is_final(a->code))
        finish(w, client);
    else
        think(w, client);
}

/* It stops waiting: asks another slot, or gives up. */
static void leave(struct world *w, uint32_t client)
{
    struct client *c = &w->clients[client];
    struct event *e = new_event(w, E_LEFT, c->slot);
    e->op = c->op;
    e->number = c->attempt;
    e->from = client;
    post(w, e, 1 + rnd(w, 3));
    c->waits = false;
    if (chance(w, 300))
        finish(w, client);
    else
        think(w, client);
}

void client_event(struct world *w, const struct event *e)
{
    uint32_t client = e->to;
    struct client *c = &w->clients[client];
    if (e->number != c->attempt)
        return;
    if (e->kind == E_ANSWER) {
        receive_answer(w, client, e);
    } else if (e->kind == E_TIMEOUT) {
        if (c->waits)
            leave(w, client);
    } else if (!c->waits) {
        if (!c->busy && !(c->busy = choose_op(w, client)))
            return;
        ask(w, client);
    }
}
