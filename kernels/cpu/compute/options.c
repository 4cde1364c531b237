/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu/compute/options.h"

const struct moe_backend_option moe_cpu_options[MOE_CPU_OPTION_COUNT + 1] = {
    [MOE_CPU_OPTION_TRANSPORT] = {"transport", "auto|nvlink|network",
                                  "How rows travel between slots; nvlink needs GPUs. The same on "
                                  "all workers",
                                  MOE_SCOPE_SESSION},
};
