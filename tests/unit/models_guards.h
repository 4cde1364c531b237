/* SPDX-License-Identifier: Apache-2.0 */
/* Guards (base/guard.h) of the machine of added models, and the promise that breaks without each.
 * X(name, promise); `test_models_sim --guards` switches each off in turn. */
X(NUMBER_IS_SAVED, "a number is durable before a worker sees it, and is given once")
X(COMPARE_FILES, "all slots that load a model have the same files")
X(KNOW_THE_ORDER, "a late report is not taken for that of a later order")
X(ADD_WHAT_ALL_HOLD, "a model is added when all slots hold it")
X(ADD_WHAT_IS_SAVED, "a model is durable before it is added")
X(QUIESCE_ALL, "a model is removed when no slot takes requests for it")
X(REMOVE_ON_ALL, "a model is closed when all slots have run its last ticket")
X(REMOVE_BEFORE_CLOSE, "no slot that may get a ticket of a model closes it")
X(UNLIST_CLOSED, "a slot that was away at a CLOSE frees the model when it returns")
