/* SPDX-License-Identifier: Apache-2.0 */
/* The commands. */
#ifndef MOECTL_COMMANDS_H
#define MOECTL_COMMANDS_H

#include "moectl/io/cli.h"

extern const struct moectl_command moectl_up, moectl_down, moectl_status, moectl_wait,
    moectl_forward, moectl_bench, moectl_training, moectl_replace, moectl_restart, moectl_model,
    moectl_load, moectl_unload, moectl_context, moectl_version, moectl_log_level, moectl_get,
    moectl_describe, moectl_health, moectl_drain, moectl_cordon, moectl_uncordon, moectl_top,
    moectl_placement, moectl_diag, moectl_rebalance, moectl_scale;

#endif
