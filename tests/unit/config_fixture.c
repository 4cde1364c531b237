/* SPDX-License-Identifier: Apache-2.0 */
/* See config_fixture.h. */
#include "config_fixture.h"

#include "model/json_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct moe_status read_text(const char *text, struct moe_config *out)
{
    json_t *root = NULL;
    assert_ok(moe_json_parse(text, strlen(text), "config.json", &root));
    struct moe_status st = moe_config_read(root, out);
    json_decref(root);
    return st;
}

json_t *golden(const char *family)
{
    char path[512];
    snprintf(path, sizeof path, MOE_GOLDEN_DIR "/%s", family);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(fd >= 0);
    json_t *root = NULL;
    assert_ok(moe_json_read_at(fd, "config.json", 1 << 20, &root));
    close(fd);
    return root;
}

#define SAME_INT(field)                                                                            \
    if (got->field != want->field)                                                                 \
    fail_msg(#field " is %ld, not %ld", (long)got->field, (long)want->field)
#define SAME_FLOAT(field)                                                                          \
    if (got->field != want->field)                                                                 \
    fail_msg(#field " is %.9g, not %.9g", (double)got->field, (double)want->field)

static void check_spec(const struct moe_layer_spec *got, const struct moe_layer_spec *want)
{
    SAME_INT(layer);
    SAME_INT(hidden);
    SAME_INT(experts);
    SAME_INT(intermediate);
    SAME_INT(router.score);
    SAME_INT(router.top_k);
    SAME_INT(router.logit_bias);
    SAME_INT(router.select_bias);
    SAME_INT(router.by_token);
    SAME_INT(router.vocabulary);
    SAME_INT(router.groups);
    SAME_INT(router.topk_group);
    SAME_INT(router.group_best);
    SAME_INT(router.renorm);
    SAME_FLOAT(router.renorm_eps);
    SAME_FLOAT(router.scale);
    SAME_FLOAT(router.jitter);
    SAME_INT(router.zero_experts);
    SAME_INT(weighting);
    SAME_INT(activation);
    SAME_FLOAT(swiglu_limit);
    SAME_FLOAT(swiglu_alpha);
    SAME_INT(gate_up_bias);
    SAME_INT(down_bias);
    SAME_INT(latent);
    SAME_INT(latent_norm);
    SAME_FLOAT(latent_eps);
    SAME_INT(shared_intermediate);
    SAME_INT(shared_gated);
    SAME_INT(shared_activation);
}

void check_config(const struct moe_config *c, uint32_t first, size_t count,
                  struct moe_layer_spec want)
{
    assert_int_equal(c->layer_count, count);
    for (size_t i = 0; i < count; i++) {
        want.layer = first + (uint32_t)i;
        check_spec(&c->layers[i], &want);
    }
}

void check_golden(const char *family, uint32_t first, size_t count, struct moe_layer_spec want)
{
    struct moe_config c;
    json_t *root = golden(family);
    assert_ok(moe_config_read(root, &c));
    assert_string_equal(c.model_type, json_string_value(json_object_get(root, "model_type")));
    check_config(&c, first, count, want);
    json_decref(root);
}

struct moe_status read_with(json_t *root, json_t *object, const char *key, const char *value)
{
    struct moe_config c;
    if (value == NULL)
        assert_int_equal(json_object_del(object, key), 0);
    else
        json_object_set_new(object, key, json_loads(value, JSON_DECODE_ANY, NULL));
    struct moe_status st = moe_config_read(root, &c);
    json_decref(root);
    return st;
}
