/* SPDX-License-Identifier: Apache-2.0 */
/* The settings of a checkpoint, compared with those of these workers. */
#include "checkpoint/internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* Bytes of a setting in the form of an option; two of them fit into a status. */
enum { SETTING_TEXT = 72, FINGERPRINT_SHOWN = 12 };

/* All but the model. */
static json_t *settings_of(const struct moe_trainer_config *t)
{
    json_t *lora = t->lora_rank == 0
                       ? json_null()
                       : json_pack("{s:I, s:f, s:I}", "rank", (json_int_t)t->lora_rank, "alpha",
                                   (double)t->lora_alpha, "targets", (json_int_t)t->lora_targets);
    return json_pack("{s:s, s:I, s:o}", "optimizer",
                     t->optimizer == MOE_OPTIMIZER_ADAMW ? "adamw" : "sgd", "never_trained",
                     (json_int_t)t->frozen, "lora", lora);
}

json_t *moe_ckpt__settings(const struct moe_checkpoint_context *c)
{
    json_t *all = settings_of(c->config);
    if (all != NULL &&
        json_object_set_new(all, "model", json_string(moe_model_fingerprint(c->model))) == 0)
        return all;
    json_decref(all);
    return NULL;
}

/* ------------------------------------------------------------------ in the form of options */

/* "gate,down": the names of the bits that are set. */
static void list_bits(char text[SETTING_TEXT], json_int_t bits, const char *const *names,
                      size_t count)
{
    size_t used = strlen(text);
    bool first = true;
    for (size_t i = 0; i < count && used < SETTING_TEXT; i++) {
        if ((bits >> i & 1) == 0)
            continue;
        used +=
            (size_t)snprintf(text + used, SETTING_TEXT - used, "%s%s", first ? "" : ",", names[i]);
        first = false;
    }
}

static void say_model(const json_t *value, char text[SETTING_TEXT])
{
    const char *fingerprint = json_string_value(value);
    snprintf(text, SETTING_TEXT, "a --model of fingerprint %.*s", FINGERPRINT_SHOWN,
             fingerprint != NULL ? fingerprint : "?");
}

static void say_optimizer(const json_t *value, char text[SETTING_TEXT])
{
    const char *name = json_string_value(value);
    snprintf(text, SETTING_TEXT, "--training %.16s", name != NULL ? name : "?");
}

static void say_frozen(const json_t *value, char text[SETTING_TEXT])
{
    static const char *const parts[] = {[MOE_PARAMS_ROUTER] = "router",
                                        [MOE_PARAMS_EXPERTS] = "experts",
                                        [MOE_PARAMS_SHARED] = "shared"};
    json_int_t bits = json_integer_value(value);
    snprintf(text, SETTING_TEXT, bits == 0 ? "no --freeze" : "--freeze ");
    list_bits(text, bits, parts, sizeof parts / sizeof *parts);
}

static void say_lora(const json_t *value, char text[SETTING_TEXT])
{
    static const char *const targets[] = {"gate", "up", "down"};
    if (!json_is_object(value)) {
        snprintf(text, SETTING_TEXT, "no --lora-rank");
        return;
    }
    snprintf(text, SETTING_TEXT, "--lora-rank %lld --lora-alpha %g --lora-targets ",
             (long long)json_integer_value(json_object_get(value, "rank")),
             json_number_value(json_object_get(value, "alpha")));
    list_bits(text, json_integer_value(json_object_get(value, "targets")), targets,
              sizeof targets / sizeof *targets);
}

static const struct {
    const char *key;
    void (*say)(const json_t *value, char text[SETTING_TEXT]);
} settings[] = {
    {"model", say_model},
    {"optimizer", say_optimizer},
    {"lora", say_lora},
    {"never_trained", say_frozen},
};

struct moe_status moe_ckpt__check_settings(const struct moe_checkpoint_context *c,
                                           const json_t *manifest)
{
    char made[SETTING_TEXT], run[SETTING_TEXT];
    struct moe_status st = moe_ok();
    json_t *ours = moe_ckpt__settings(c), *theirs = json_object_get(manifest, "settings");
    if (ours == NULL)
        return moe_ckpt__no_memory();
    for (size_t i = 0; i < sizeof settings / sizeof *settings && !moe_failed(&st); i++) {
        const json_t *own = json_object_get(ours, settings[i].key);
        const json_t *other = json_object_get(theirs, settings[i].key);
        if (json_equal(own, other))
            continue;
        settings[i].say(other, made);
        settings[i].say(own, run);
        st = moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_VERSION_MISMATCH,
                       "made with %s; these workers run with %s", made, run);
    }
    json_decref(ours);
    return st;
}

void moe_checkpoint_describe(const struct moe_trainer_config *config, char *text, size_t capacity)
{
    char one[SETTING_TEXT];
    size_t used = 0;
    json_t *all = settings_of(config);
    text[0] = '\0';
    for (size_t i = 1; i < sizeof settings / sizeof *settings && used < capacity; i++) {
        settings[i].say(json_object_get(all, settings[i].key), one);
        used += (size_t)snprintf(text + used, capacity - used, "%s%s", i > 1 ? ", " : "", one);
    }
    json_decref(all);
}

/* -------------------------------------------------------------------- kinds of directories */

static bool is_there(int at, const char *name)
{
    struct stat unused;
    return fstatat(at, name, &unused, AT_SYMLINK_NOFOLLOW) == 0;
}

/* A directory without a manifest is no checkpoint; the error names what else it is. */
struct moe_status moe_ckpt__check_kind(int directory)
{
    if (is_there(directory, MOE_CKPT_MANIFEST))
        return moe_ok();
    if (is_there(directory, "adapter_config.json"))
        return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_UNSUPPORTED,
                         "it is an adapter exported for PEFT, not a checkpoint: it has no "
                         "optimizer state");
    return moe_error(MOE_FAILED_PRECONDITION, MOE_REASON_CHECKPOINT_NOT_FOUND,
                     "it is no checkpoint: it has no " MOE_CKPT_MANIFEST);
}
