/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as model.safetensors.index.json. It is refused, or every file that it names is inside
 * the model directory. */
#include "driver.h"
#include "model/checkpoint.h"
#include "model/json_file.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *index = NULL, *map = NULL;
    struct moe_status st = moe_json_parse((const char *)data, size, "index", &index);
    if (moe_failed(&st))
        return 0;
    st = moe_checkpoint_check_index(index, &map);
    if (!moe_failed(&st)) {
        const char *tensor;
        json_t *file;
        json_object_foreach(map, tensor, file)
        {
            const char *name = json_string_value(file);
            MOE_INVARIANT(name != NULL && strlen(name) == json_string_length(file));
            MOE_INVARIANT(strchr(name, '/') == NULL && name[0] != '.' && name[0] != '\0');
        }
    }
    json_decref(index);
    return 0;
}

size_t moe_fuzz_seed(size_t i, const uint8_t **data)
{
    static const char *const seeds[] = {
        "{\"metadata\":{\"total_size\":12},\"weight_map\":{"
        "\"model.layers.0.mlp.gate.weight\":\"model-00001-of-00002.safetensors\","
        "\"model.layers.0.mlp.experts.0.up_proj.weight\":\"model-00002-of-00002.safetensors\"}}",
        "{\"weight_map\":{\"a\":\"../x\"}}",
        "{\"weight_map\":{\"a\":\"x/..\"}}",
        "{\"weight_map\":{\"a\":\"b\"}}",
    };
    if (i >= sizeof seeds / sizeof seeds[0])
        return 0;
    *data = (const uint8_t *)seeds[i];
    return strlen(seeds[i]);
}
