/* SPDX-License-Identifier: Apache-2.0 */
/* moectl forward: one layer for the tokens of a safetensors file. */
#include "commands.h"
#include "moectl/group/link.h"
#include "moectl/io/histogram.h"
#include "moectl/io/tensor_io.h"

#include "base/clock.h"
#include "base/mutex.h"
#include "base/size.h"
#include "base/wait.h"
#include "moe/client.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct forward {
    struct moectl_common common;
    struct moectl_tensor_names names;
    const char *input, *output, *dtype, *model, *model_digest, *parts, *policy;
    uint8_t *token_states; /* [T] with --on-unavailable partial */
    uint32_t *rehomed;     /* [E] with --return-rehomed */
    uint64_t layer, repeat;
    bool return_routing, return_rehomed, stream, spread;

    struct moe_client *client;
    struct moe_client_stream *link; /* with --stream */
    struct moectl_tokens x, y;
    struct moe_client_forward call;
    struct moectl_histogram latency_ns;
};

/* ------------------------------------------------------------------ one call */

/* The end of a call on a stream. */
struct waiter {
    struct moe_mutex lock;
    pthread_cond_t over;
    MOE_GUARDED_BY(lock) struct {
        bool is_over;
        struct moe_status status;
    };
};

static void on_done(void *ctx, struct moe_client_forward *f, struct moe_status st)
{
    struct waiter *w = ctx;
    (void)f;
    moe_mutex_lock(&w->lock);
    w->status = st;
    w->is_over = true;
    pthread_cond_signal(&w->over);
    moe_mutex_unlock(&w->lock);
}

static struct moe_status call_on_stream(struct moe_client_stream *s, struct moe_client_forward *f)
{
    struct waiter w = {.lock = MOE_MUTEX_INITIALIZER, .over = PTHREAD_COND_INITIALIZER};
    moe_client_stream_forward(s, f, on_done, &w);
    moe_mutex_lock(&w.lock);
    while (!w.is_over)
        moe_wait(&w.over, &w.lock);
    struct moe_status st = w.status;
    moe_mutex_unlock(&w.lock);
    pthread_cond_destroy(&w.over);
    moe_mutex_destroy(&w.lock);
    return st;
}

static struct moe_status call_once(struct forward *o)
{
    uint64_t begin = moe_clock_ns();
    struct moe_status st = o->link != NULL ? call_on_stream(o->link, &o->call)
                                           : moe_client_forward(o->client, &o->call);
    moectl_histogram_add(&o->latency_ns, moe_clock_ns() - begin);
    return st;
}

/* ------------------------------------------------------------------ the whole */

static const struct moe_client_layer *find_layer(const struct moe_client_info *info, uint64_t layer)
{
    for (size_t i = 0; i < info->layer_count; i++)
        if (info->layers[i].layer == layer)
            return &info->layers[i];
    return NULL;
}

static const char *const policy_names[] = {
    [MOE_ON_UNAVAILABLE_WAIT] = "wait",
    [MOE_ON_UNAVAILABLE_FAIL] = "fail",
    [MOE_ON_UNAVAILABLE_PARTIAL] = "partial",
};
enum { POLICIES = sizeof policy_names / sizeof *policy_names };

/* The place of `name` among `names`; 0 for NULL, `count` for a name that does not exist. */
static unsigned place_of(const char *name, const char *const *names, unsigned count)
{
    unsigned i = 0;
    while (name != NULL && i < count && strcmp(name, names[i]) != 0)
        i++;
    return i;
}

static enum moe_on_unavailable policy_of(const struct forward *o)
{
    return (enum moe_on_unavailable)place_of(o->policy, policy_names, POLICIES);
}

static const char *const parts_names[] = {
    [MOE_PARTS_BOTH] = "both",
    [MOE_PARTS_ROUTED] = "routed",
    [MOE_PARTS_SHARED] = "shared",
};
enum { PARTS = sizeof parts_names / sizeof *parts_names };

/* PARTS for a name that does not exist. */
static enum moe_parts parts_of(const struct forward *o)
{
    return (enum moe_parts)place_of(o->parts, parts_names, PARTS);
}

/* Allocates the answer and fills in the call. */
static struct moe_status prepare(struct forward *o)
{
    const struct moe_client_layer *layer = find_layer(moe_client_get_info(o->client), o->layer);
    if (layer == NULL)
        return moe_error(MOE_NOT_FOUND, MOE_REASON_LAYER_NOT_FOUND,
                         "the model has no MoE layer %" PRIu64, o->layer);
    if (o->x.top_k != 0 && o->x.top_k != layer->top_k)
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_SHAPE_MISMATCH,
                         "the routing has %" PRIu32 " experts per token, the layer %" PRIu32,
                         o->x.top_k, layer->top_k);
    struct moectl_tokens *y = &o->y;
    y->tokens = o->x.tokens;
    y->width = o->x.width;
    y->dtype = o->x.dtype;
    y->data = calloc((size_t)y->tokens * y->width, moe_dtype_bytes(y->dtype));
    if (o->return_routing) {
        y->top_k = layer->top_k;
        y->topk_ids = calloc((size_t)y->tokens * y->top_k, sizeof *y->topk_ids);
        y->topk_weights = calloc((size_t)y->tokens * y->top_k, sizeof *y->topk_weights);
    }
    if (policy_of(o) == MOE_ON_UNAVAILABLE_PARTIAL) {
        o->token_states = calloc(y->tokens, sizeof *o->token_states);
        if (o->token_states == NULL)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "answer");
    }
    if (o->return_rehomed) {
        o->rehomed = calloc(layer->experts, sizeof *o->rehomed);
        if (o->rehomed == NULL)
            return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "answer");
    }
    if (y->data == NULL || (o->return_routing && (y->topk_ids == NULL || y->topk_weights == NULL)))
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "answer");
    o->call = (struct moe_client_forward){
        .size = sizeof o->call,
        .layer = (uint32_t)o->layer,
        .tokens = o->x.tokens,
        .hidden = o->x.width,
        .dtype = o->x.dtype,
        .x = o->x.data,
        .topk_ids_in = o->x.topk_ids,
        .topk_weights_in = o->x.topk_weights,
        .token_ids_in = o->x.token_ids,
        .y = y->data,
        .topk_ids = y->topk_ids,
        .topk_weights = y->topk_weights,
        .parts = parts_of(o),
        .on_unavailable = policy_of(o),
        .token_states = o->token_states,
        .rehomed_experts = o->rehomed,
    };
    return moe_ok();
}

/* Calls `repeat` times; every answer must equal the first one, bit for bit. */
static struct moe_status call_all(struct forward *o)
{
    size_t bytes;
    if (!moe_size_mul3(o->y.tokens, o->y.width, moe_dtype_bytes(o->y.dtype), &bytes))
        return moe_error(MOE_INVALID_ARGUMENT, MOE_REASON_TOO_LARGE, "the input is too large");
    MOE_TRY(call_once(o));
    if (o->repeat == 1)
        return moe_ok();
    void *first = malloc(bytes);
    if (first == NULL)
        return moe_error(MOE_RESOURCE_EXHAUSTED, MOE_REASON_OUT_OF_MEMORY, "answer");
    memcpy(first, o->y.data, bytes);
    struct moe_status st = moe_ok();
    for (uint64_t i = 1; i < o->repeat && st.code == MOE_OK; i++) {
        st = call_once(o);
        if (st.code == MOE_OK && memcmp(first, o->y.data, bytes) != 0)
            st = moe_error(MOE_DATA_LOSS, MOE_REASON_NONE,
                           "answer %" PRIu64 " differs from the first one", i + 1);
    }
    free(first);
    return st;
}

static struct moe_status work(struct forward *o)
{
    char endpoint[MOECTL_ENDPOINT_MAX];
    MOE_TRY(moectl_tokens_read(o->input, &o->names, &o->x));
    if (o->dtype != NULL)
        MOE_TRY(moectl_tokens_convert(&o->x, o->dtype[0] == 'f' ? MOE_DTYPE_F32 : MOE_DTYPE_BF16));
    MOE_TRY(moectl_worker_endpoint(&o->common, moectl_deadline(&o->common), endpoint));
    struct moe_client_config config = {
        .size = sizeof config,
        .endpoint = endpoint,
        .spread = o->spread,
        .model = o->model,
        .model_digest = o->model_digest,
        .timeout_ms = moectl_timeout_ms(&o->common),
    };
    MOE_TRY(moe_client_connect(&config, &o->client));
    MOE_TRY(prepare(o));
    if (o->stream)
        MOE_TRY(moe_client_stream_open(o->client, &o->link));
    MOE_TRY(call_all(o));
    return moectl_tokens_write(o->output, &o->y);
}

/* Indices of the tokens without a result; NULL without memory. `*count`: their number. */
static json_t *unavailable_tokens(const struct forward *o, uint32_t *count)
{
    json_t *list = json_array();
    *count = 0;
    for (uint32_t t = 0; o->token_states != NULL && t < o->y.tokens; t++) {
        if (o->token_states[t] == 0)
            continue;
        ++*count;
        if (list != NULL && json_array_append_new(list, json_integer(t)) != 0) {
            json_decref(list);
            list = NULL;
        }
    }
    return list;
}

/* Ids of re-homed experts; NULL without memory. */
static json_t *rehomed_experts(const struct forward *o)
{
    json_t *list = json_array();
    for (size_t i = 0; list != NULL && i < o->call.rehomed_count; i++)
        if (json_array_append_new(list, json_integer(o->rehomed[i])) != 0) {
            json_decref(list);
            list = NULL;
        }
    return list;
}

static void put_rehomed(const struct forward *o)
{
    moectl_put("%zu re-homed experts", o->call.rehomed_count);
    for (size_t i = 0; i < o->call.rehomed_count; i++)
        moectl_put("%s %" PRIu32, i == 0 ? ":" : ",", o->rehomed[i]);
    moectl_put("\n");
}

static int report(const struct forward *o)
{
    uint32_t unavailable;
    json_t *tokens = unavailable_tokens(o, &unavailable);
    const char *dtype = o->y.dtype == MOE_DTYPE_F32 ? "f32" : "bf16";
    double p50_us = (double)moectl_histogram_percentile(&o->latency_ns, 50) / 1000.0;
    if (!o->common.document) {
        moectl_put("layer %" PRIu64 ", %" PRIu32 " tokens of %" PRIu32 " (%s), epoch %" PRIu64
                   ", %" PRIu64 " x %.1f us -> %s\n",
                   o->layer, o->y.tokens, o->y.width, dtype, o->call.answered_epoch, o->repeat,
                   p50_us, o->output);
        if (o->token_states != NULL)
            moectl_put("%" PRIu32 " of %" PRIu32 " tokens have no result: their experts have no "
                       "copy now\n",
                       unavailable, o->y.tokens);
        if (o->return_rehomed)
            put_rehomed(o);
        json_decref(tokens);
        return MOECTL_OK;
    }
    char epoch[24], version[24];
    snprintf(epoch, sizeof epoch, "%" PRIu64, o->call.answered_epoch);
    snprintf(version, sizeof version, "%" PRIu64, o->call.answered_weights_version);
    json_t *document = moectl_document("ForwardResult");
    json_t *fields = json_pack(
        "{s:s, s:I, s:I, s:I, s:s, s:s, s:s, s:I, s:f, s:s, s:o, s:o}", "model",
        moe_client_get_info(o->client)->model, "layer", (json_int_t)o->layer, "tokens",
        (json_int_t)o->y.tokens, "hidden", (json_int_t)o->y.width, "dtype", dtype, "epoch", epoch,
        "weightsVersion", version, "repeat", (json_int_t)o->repeat, "latencyUs", p50_us, "output",
        o->output, "unavailableTokens", tokens, "rehomedExperts", rehomed_experts(o));
    if (document == NULL || fields == NULL || json_object_update(document, fields) != 0) {
        json_decref(document);
        document = NULL;
    }
    json_decref(fields);
    return moectl_print(document);
}

static int check(const struct forward *o)
{
    const struct moectl_required required[] = {
        {"layer", o->layer != MOE_OPTION_UNSET},
        {"input", o->input != NULL},
        {"output", o->output != NULL},
    };
    int code = moectl_require(required, sizeof required / sizeof *required);
    if (code != MOECTL_OK)
        return code;
    if (o->dtype != NULL && strcmp(o->dtype, "f32") != 0 && strcmp(o->dtype, "bf16") != 0)
        return moectl_usage_error("--dtype must be f32 or bf16, not '%s'", o->dtype);
    if ((unsigned)parts_of(o) == PARTS)
        return moectl_usage_error("--parts must be both, routed or shared, not '%s'", o->parts);
    if ((unsigned)policy_of(o) == POLICIES)
        return moectl_usage_error("--on-unavailable must be wait, fail or partial, not '%s'",
                                  o->policy);
    if (o->names.topk_weights != NULL && o->names.topk_ids == NULL)
        return moectl_usage_error("--topk-weights needs --topk-ids");
    if (o->names.token_ids != NULL && o->names.topk_ids != NULL)
        return moectl_usage_error("--token-ids excludes --topk-ids");
    return moectl_check_digest(o->model_digest);
}

static int run(const struct moectl_command *self, int argc, char **argv)
{
    struct forward o = {.common = {.format = "table", .timeout_s = 10}, .repeat = 1};
    o.layer = MOE_OPTION_UNSET;
    const struct moe_option options[] = {
        {"layer", 'l', MOE_OPTION_UINT, &o.layer, 0, UINT32_MAX, "L",
         "layer index in the model (required)"},
        {"input", 'i', MOE_OPTION_STRING, &o.input, 0, 0, "FILE",
         "safetensors file with x (required)"},
        {"tensor", 0, MOE_OPTION_STRING, &o.names.x, 0, 0, "NAME",
         "[T,H] tensor of the input; default: its only F32 or BF16 tensor with 2 dimensions"},
        {"output", 0, MOE_OPTION_STRING, &o.output, 0, 0, "FILE",
         "safetensors file to write (required)"},
        {"dtype", 0, MOE_OPTION_STRING, &o.dtype, 0, 0, "f32|bf16",
         "convert x before sending; default: as in the file"},
        {"topk-ids", 0, MOE_OPTION_STRING, &o.names.topk_ids, 0, 0, "NAME",
         "I32 [T,K] tensor of the input: experts to use; default: the router chooses"},
        {"topk-weights", 0, MOE_OPTION_STRING, &o.names.topk_weights, 0, 0, "NAME",
         "F32 [T,K] tensor of the input: their weights; default: the router's"},
        {"token-ids", 0, MOE_OPTION_STRING, &o.names.token_ids, 0, 0, "NAME",
         "I64 [T] tensor of the input, for a layer that routes by token id; default: none"},
        {"return-routing", 0, MOE_OPTION_BOOL, &o.return_routing, 0, 0, NULL,
         "also write topk_ids (I32) and topk_weights (F32)"},
        {"return-rehomed", 0, MOE_OPTION_BOOL, &o.return_rehomed, 0, 0, NULL,
         "tell the layer's re-homed experts: they have lost a copy, and another one computes"},
        {"parts", 0, MOE_OPTION_STRING, &o.parts, 0, 0, "both|routed|shared",
         "routed experts, shared experts, or both; default: both"},
        {"on-unavailable", 0, MOE_OPTION_STRING, &o.policy, 0, 0, "wait|fail|partial",
         "if experts of some tokens have no copy in the view: wait for them, fail, or take the "
         "other "
         "tokens; default: wait"},
        {"repeat", 0, MOE_OPTION_UINT, &o.repeat, 1, 1000000, "N",
         "send N times; fail unless all answers are equal bit for bit"},
        {"stream", 0, MOE_OPTION_BOOL, &o.stream, 0, 0, NULL, "send on a stream"},
        {"model", 0, MOE_OPTION_STRING, &o.model, 0, 0, "NAME",
         "model of the group; default: the default model"},
        {"model-digest", 0, MOE_OPTION_STRING, &o.model_digest, 0, 0, "HEX",
         "fail unless the group serves the model with this digest (see moectl status)"},
        {"spread", 0, MOE_OPTION_BOOL, &o.spread, 0, 0, NULL,
         "send requests to all workers in turn, and split large batches"},
    };
    int code;
    if (!moectl_parse(self, options, sizeof options / sizeof *options, &o.common, argc, argv,
                      &code))
        return code;
    code = check(&o);
    if (code != MOECTL_OK)
        return code;
    struct moe_status st = work(&o);
    code = st.code == MOE_OK ? report(&o) : moectl_fail(&st);
    moe_client_stream_close(o.link);
    moe_client_close(o.client);
    moectl_tokens_free(&o.x);
    moectl_tokens_free(&o.y);
    free(o.token_states);
    free(o.rehomed);
    return code;
}

const struct moectl_command moectl_forward = {
    .name = "forward",
    .summary =
        "Sends a tensor of a safetensors file through one layer; writes the output as tensor `y`.",
    .usage = "--layer L --input FILE --output FILE [--tensor NAME] [options]",
    .examples = "  moectl forward --endpoint 127.0.0.1:7600 --layer 3 --input x.safetensors "
                "--output y.safetensors\n"
                "  moectl forward --layer 3 --input x.safetensors --output y.safetensors "
                "--return-routing --stream\n",
    .run = run,
};
