/* Adapters as PEFT reads them. Each slot writes those of its experts to a file of its own; the
 * lowest then makes one of them, because PEFT reads one. */
#include "worker/checkpoint_internal.h"

#include "base/log.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ADAPTER_FILE   "adapter_model.safetensors"
#define ADAPTER_CONFIG "adapter_config.json"

enum { PEFT_NAME_MAX = MOE_MODEL_NAME_MAX + 48 };

static const struct {
    uint32_t bit;
    enum moe_weight weight;
} targets[] = {{MOE_LORA_GATE, MOE_WEIGHT_GATE},
               {MOE_LORA_UP, MOE_WEIGHT_UP},
               {MOE_LORA_DOWN, MOE_WEIGHT_DOWN}};

static struct moe_status named(struct moe_status st, const char *name)
{
    return moe_error_context(st, "adapter %s", name);
}

/* "model.layers.0.mlp.experts.3.gate_proj": the tensor's name without ".weight". */
static struct moe_status module_name(const struct moe_checkpoint_context *c, size_t layer,
                                     enum moe_weight weight, uint32_t expert,
                                     char name[MOE_MODEL_NAME_MAX])
{
    static const char tail[] = ".weight";
    struct moe_status st = moe_model_weight_name(c->model, layer, weight, expert, name);
    if (st.code == MOE_UNIMPLEMENTED)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "this model keeps its experts in common tensors, for which PEFT has no "
                         "adapters of gate and up: merge instead, or save a checkpoint");
    MOE_TRY(st);
    size_t n = strlen(name), cut = sizeof tail - 1;
    if (n <= cut || strcmp(name + n - cut, tail) != 0)
        return moe_error(MOE_UNIMPLEMENTED, MOE_REASON_UNSUPPORTED,
                         "tensor %.120s belongs to no module", name);
    name[n - cut] = '\0';
    return moe_ok();
}

/* ---------------------------------------------------------------------- the parts */

struct adapters {
    const struct moe_checkpoint_context *context;
    struct moe_st_out *out; /* names are ours */
    struct moe_ckpt_tensor *from;
    size_t count;
};

static void free_adapters(struct adapters *a)
{
    for (size_t i = 0; i < a->count; i++)
        free((char *)a->out[i].name);
    free(a->out);
    free(a->from);
}

/* The A or B called `t`, under PEFT's name. */
static struct moe_status add_adapter(struct adapters *a, const struct moe_ckpt_tensor *t)
{
    char module[MOE_MODEL_NAME_MAX], name[PEFT_NAME_MAX];
    MOE_TRY(module_name(a->context, t->layer, t->key.weight, t->key.expert, module));
    snprintf(name, sizeof name, "base_model.model.%s.lora_%c.weight", module,
             t->key.part == MOE_PART_LORA_A ? 'A' : 'B');
    char *copy = strdup(name);
    if (copy == NULL)
        return moe_ckpt__no_memory();
    a->from[a->count] = *t;
    a->out[a->count++] = (struct moe_st_out){
        .name = copy, .dtype = MOE_ST_F32, .rank = 2, .shape = {t->rows, t->columns}};
    return moe_ok();
}

static struct moe_status list_adapters(struct adapters *a)
{
    struct moe_ckpt_tensors all;
    MOE_TRY(moe_ckpt__list(a->context, true, &all));
    a->out = calloc(all.count + 1, sizeof *a->out);
    a->from = calloc(all.count + 1, sizeof *a->from);
    struct moe_status st = a->out != NULL && a->from != NULL ? moe_ok() : moe_ckpt__no_memory();
    for (size_t i = 0; i < all.count && !moe_failed(&st); i++)
        if (all.list[i].key.part != MOE_PART_WEIGHT && all.list[i].key.tensor == MOE_TRAIN_VALUE)
            st = add_adapter(a, &all.list[i]);
    moe_ckpt__list_free(&all);
    return st;
}

static struct moe_status read_adapter(void *ctx, size_t i, void *to, uint64_t bytes)
{
    const struct adapters *a = ctx;
    return moe_ckpt__read(a->context, &a->from[i], to, (size_t)bytes);
}

struct moe_status moe_checkpoint_export_begin(const struct moe_checkpoint_context *c,
                                              const char *name)
{
    int hidden = -1;
    char module[MOE_MODEL_NAME_MAX];
    for (size_t i = 0; i < sizeof targets / sizeof targets[0]; i++)
        if ((c->config->lora_targets & targets[i].bit) != 0)
            for (size_t layer = 0; layer < c->layer_count; layer++)
                MOE_TRY(named(module_name(c, layer, targets[i].weight, 0, module), name));
    MOE_TRY(named(moe_ckpt__begin(c->root, name, &hidden), name));
    close(hidden);
    return moe_ok();
}

struct moe_status moe_checkpoint_export_write(const struct moe_checkpoint_context *c,
                                              const char *name, uint64_t *bytes)
{
    static const char *const metadata[] = {"format", "pt", NULL};
    int hidden = -1;
    char file[MOE_CKPT_FILE_MAX];
    struct adapters a = {.context = c};
    *bytes = 0;
    MOE_TRY(named(moe_ckpt__join(c->root, name, &hidden), name));
    moe_ckpt__state_file(file, c->slot, "safetensors");
    struct moe_status st = list_adapters(&a);
    if (!moe_failed(&st))
        st = moe_st_write_at(hidden, file, a.out, a.count, metadata, read_adapter, &a, bytes, NULL);
    free_adapters(&a);
    close(hidden);
    return named(st, name);
}

/* ----------------------------------------------------------------------- the whole */

/* All parts as one list. */
struct parts {
    struct moe_st_file *files[MOE_MAX_SLOTS];
    struct moe_st_out *out;
    struct place {
        const struct moe_st_file *file;
        const struct moe_tensor *tensor;
    } * from;
    size_t count;
};

static struct moe_status open_parts(const struct moe_checkpoint_context *c, int hidden,
                                    struct parts *p)
{
    size_t total = 0;
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        char file[MOE_CKPT_FILE_MAX];
        if ((c->live >> slot & 1) == 0)
            continue;
        moe_ckpt__state_file(file, slot, "safetensors");
        MOE_TRY(moe_st_open_at(hidden, file, &p->files[slot]));
        total += moe_st_count(p->files[slot]);
    }
    p->out = calloc(total + 1, sizeof *p->out);
    p->from = calloc(total + 1, sizeof *p->from);
    if (p->out == NULL || p->from == NULL)
        return moe_ckpt__no_memory();
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        for (size_t i = 0; p->files[slot] != NULL && i < moe_st_count(p->files[slot]); i++) {
            const struct moe_tensor *t = moe_st_tensor(p->files[slot], i);
            struct moe_st_out *out = &p->out[p->count];
            *out = (struct moe_st_out){.name = t->name, .dtype = t->dtype, .rank = t->rank};
            memcpy(out->shape, t->shape, sizeof out->shape);
            p->from[p->count++] = (struct place){p->files[slot], t};
        }
    }
    return moe_ok();
}

static struct moe_status read_part(void *ctx, size_t i, void *to, uint64_t bytes)
{
    const struct parts *p = ctx;
    return moe_st_read(p->from[i].file, p->from[i].tensor, 0, bytes, to);
}

static struct moe_status join_parts(const struct moe_checkpoint_context *c, int hidden)
{
    static const char *const metadata[] = {"format", "pt", NULL};
    uint64_t bytes;
    struct parts p = {.count = 0};
    struct moe_status st = open_parts(c, hidden, &p);
    if (!moe_failed(&st))
        st = moe_st_write_at(hidden, ADAPTER_FILE, p.out, p.count, metadata, read_part, &p, &bytes,
                             NULL);
    for (uint32_t slot = 0; slot < MOE_MAX_SLOTS; slot++) {
        char file[MOE_CKPT_FILE_MAX];
        moe_ckpt__state_file(file, slot, "safetensors");
        if (p.files[slot] != NULL && unlinkat(hidden, file, 0) != 0 && !moe_failed(&st))
            st = moe_ckpt__io("removing a file");
        moe_st_close(p.files[slot]);
    }
    free(p.out);
    free(p.from);
    return st;
}

/* A pattern over module names, so that a dense or shared expert's module of the same name has no
 * adapter: ".*\.layers\.[0-9]+\.(mlp\.experts\.([0-9]+\.)?gate_proj|...)". Without a number it
 * is what PEFT asks for where transformers keeps the experts of a layer in one parameter. */
static struct moe_status target_pattern(const struct moe_checkpoint_context *c, char *to,
                                        size_t room)
{
    static const char number[] = "\\.([0-9]+\\.)?";
    size_t at = (size_t)snprintf(to, room, ".*\\.layers\\.[0-9]+\\.(");
    for (size_t i = 0; i < sizeof targets / sizeof targets[0]; i++) {
        char module[MOE_MODEL_NAME_MAX];
        if ((c->config->lora_targets & targets[i].bit) == 0)
            continue;
        MOE_TRY(module_name(c, 0, targets[i].weight, 0, module));
        /* Behind "layers.N.": the block, the expert's number, the projection. */
        const char *tail = strstr(module, "layers.");
        tail = tail != NULL ? strchr(tail + strlen("layers."), '.') : NULL;
        if (tail == NULL)
            return moe_error(MOE_INTERNAL, MOE_REASON_UNSUPPORTED, "module %s", module);
        if (to[at - 1] != '(')
            to[at++] = '|';
        for (tail++; *tail != '\0' && at + sizeof number + 2 < room; tail++) {
            if (*tail == '.' && tail[1] == '0' && tail[2] == '.') {
                memcpy(to + at, number, sizeof number - 1);
                at += sizeof number - 1;
                tail += 2;
            } else if (*tail == '.') {
                to[at++] = '\\';
                to[at++] = '.';
            } else {
                to[at++] = *tail;
            }
        }
    }
    to[at++] = ')';
    to[at] = '\0';
    return moe_ok();
}

static struct moe_status write_config(const struct moe_checkpoint_context *c, int hidden)
{
    char pattern[1024];
    MOE_TRY(target_pattern(c, pattern, sizeof pattern));
    double alpha = (double)c->config->lora_alpha;
    json_t *number = alpha == floor(alpha) && fabs(alpha) < 1e9 ? json_integer((json_int_t)alpha)
                                                                : json_real(alpha);
    json_t *config = json_pack(
        "{s:s, s:s, s:s, s:s, s:i, s:o, s:s, s:f, s:b, s:b, s:b}", "peft_type", "LORA", "task_type",
        "CAUSAL_LM", "base_model_name_or_path", moe_model_name(c->model), "bias", "none", "r",
        (int)c->config->lora_rank, "lora_alpha", number, "target_modules", pattern, "lora_dropout",
        0.0, "fan_in_fan_out", 0, "inference_mode", 1, "use_rslora", 0);
    if (config == NULL)
        return moe_ckpt__no_memory();
    struct moe_status st = moe_ckpt__write_json(hidden, ADAPTER_CONFIG, config, NULL);
    json_decref(config);
    return st;
}

struct moe_status moe_checkpoint_export_commit(const struct moe_checkpoint_context *c,
                                               const char *name)
{
    const uint32_t others = 1U << MOE_PARAMS_ROUTER | 1U << MOE_PARAMS_SHARED;
    int hidden = -1;
    if ((c->config->frozen & others) != others)
        moe_log_warn("adapter %s has the experts' adapters only; routers and shared experts were "
                     "not frozen from the beginning and may have learnt too",
                     name);
    MOE_TRY(named(moe_ckpt__join(c->root, name, &hidden), name));
    struct moe_status st = join_parts(c, hidden);
    if (!moe_failed(&st))
        st = write_config(c, hidden);
    if (!moe_failed(&st))
        st = moe_ckpt__sync(hidden);
    close(hidden);
    if (!moe_failed(&st))
        st = moe_ckpt__publish(c->root, name);
    return named(st, name);
}

void moe_checkpoint_export_abandon(const struct moe_checkpoint_context *c, const char *name)
{
    moe_ckpt__abandon(c->root, name);
}
