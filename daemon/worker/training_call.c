/* Training calls as they travel, and the hash of what they say. */
#include "worker/training.h"

#include "moe/v1/worker.pb-c.h"
#include "rpc/msg.h"

#include <string.h>

/* ------------------------------------------------------------------------- content */

static uint64_t stir(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 32;
}

enum { WORD = 8, CHAINS = 4 };

/* Four chains side by side, because one multiplication has to wait for the one before. */
void moe_content_mix(uint64_t hash[2], const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint64_t chain[CHAINS] = {hash[0] + 1, hash[1] + 2, ~hash[0] + 3, ~hash[1] + 4};
    uint64_t word[CHAINS];
    size_t left = bytes;
    for (; left >= sizeof word; left -= sizeof word, at += sizeof word) {
        memcpy(word, at, sizeof word);
        for (int i = 0; i < CHAINS; i++)
            chain[i] = stir(chain[i], word[i]);
    }
    memset(word, 0, sizeof word);
    if (left > 0)
        memcpy(word, at, left);
    for (int i = 0; i < CHAINS; i++)
        chain[i] = stir(stir(chain[i], word[i]), bytes);
    hash[0] = stir(stir(chain[0], chain[1]), chain[2]);
    hash[1] = stir(stir(chain[3], chain[2]), chain[1]);
}

/* --------------------------------------------------------------------------- packing */

void moe_train_call_pack(const struct moe_train_call *c, uint8_t body[MOE_TRAINING_BODY_MAX],
                         uint32_t *length)
{
    uint64_t content[4];
    Moe__V1__TrainingBody b;
    moe__v1__training_body__init(&b);
    memcpy(content, c->content.said, sizeof c->content.said);
    memcpy(content + 2, c->content.rest, sizeof c->content.rest);
    b.session = (char *)(uintptr_t)c->session; /* packing only reads */
    b.id = c->id;
    b.content = content;
    b.n_content = 4;
    b.lineage = c->lineage;
    b.weights_version = c->weights_version;
    b.aux_coeff = (double)c->aux_coeff;
    b.input_only = c->input_only;
    b.learning_rate = c->optimizer.learning_rate;
    b.weight_decay = c->optimizer.weight_decay;
    b.beta1 = c->optimizer.beta1;
    b.beta2 = c->optimizer.beta2;
    b.epsilon = c->optimizer.epsilon;
    b.momentum = c->optimizer.momentum;
    b.max_grad_norm = c->optimizer.max_grad_norm;
    b.grad_scale = c->optimizer.grad_scale;
    b.balance_rate = c->optimizer.balance_rate;
    b.expected_backwards = c->expected_backwards;
    b.frozen = c->frozen;
    b.name = (char *)(uintptr_t)c->name;
    b.keep = c->keep;
    b.merge = c->merge;
    b.saved = c->saved;
    b.saved_epoch = c->saved_epoch;
    b.poke = c->poke;
    size_t size = moe__v1__training_body__get_packed_size(&b);
    MOE_INVARIANT(size <= MOE_TRAINING_BODY_MAX);
    *length = (uint32_t)moe__v1__training_body__pack(&b, body);
}

static bool copy_name(char to[MOE_TRAINING_NAME_MAX + 1], const char *from)
{
    if (from[0] != '\0' && !moe_training_name_ok(from))
        return false;
    memset(to, 0, MOE_TRAINING_NAME_MAX + 1);
    strncpy(to, from, MOE_TRAINING_NAME_MAX);
    return true;
}

/* Which fields a kind needs. */
static bool is_complete(const struct moe_train_call *c)
{
    bool named = c->kind == MOE_STEP_SAVE || c->kind == MOE_STEP_LOAD ||
                 (c->kind == MOE_STEP_EXPORT && !c->merge);
    return c->id != 0 && (c->session[0] != '\0') == moe_step_has_rows(c->kind) &&
           (c->name[0] != '\0') == named && c->frozen < 1u << MOE_PARAMS_COUNT;
}

struct moe_status moe_train_call_read(const struct moe_ticket *ticket, struct moe_train_call *out)
{
    struct moe_rpc_arena arena;
    const Moe__V1__TrainingBody *b =
        ticket->order.length <= MOE_TRAINING_BODY_MAX
            ? moe_rpc_unpack(&moe__v1__training_body__descriptor, ticket->order.body,
                             ticket->order.length, &arena)
            : NULL;
    *out = (struct moe_train_call){.kind = ticket->kind};
    if (b == NULL || b->n_content != 4 || !copy_name(out->session, b->session) ||
        !copy_name(out->name, b->name))
        goto malformed;
    memcpy(out->content.said, b->content, sizeof out->content.said);
    memcpy(out->content.rest, b->content + 2, sizeof out->content.rest);
    out->id = b->id;
    out->lineage = b->lineage;
    out->weights_version = b->weights_version;
    out->aux_coeff = (float)b->aux_coeff;
    out->input_only = b->input_only;
    out->optimizer = (struct moe_optimizer_args){
        .learning_rate = b->learning_rate,
        .weight_decay = b->weight_decay,
        .beta1 = b->beta1,
        .beta2 = b->beta2,
        .epsilon = b->epsilon,
        .momentum = b->momentum,
        .max_grad_norm = b->max_grad_norm,
        .grad_scale = b->grad_scale,
        .balance_rate = b->balance_rate,
    };
    out->expected_backwards = b->expected_backwards;
    out->frozen = b->frozen;
    out->keep = b->keep;
    out->merge = b->merge;
    out->saved = b->saved;
    out->saved_epoch = b->saved_epoch;
    out->poke = b->poke;
    if (is_complete(out))
        return moe_ok();
malformed:
    return moe_error(MOE_INTERNAL, MOE_REASON_MALFORMED, "ticket %llu: its training call is none",
                     (unsigned long long)ticket->seq);
}
