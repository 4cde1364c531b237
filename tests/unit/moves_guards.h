/* SPDX-License-Identifier: Apache-2.0 */
/* Guards (base/guard.h) of the machine of moves, and the promise that breaks without each.
 * X(name, promise); `test_moves_sim --guards` switches each off in turn. */
X(FETCHED_BY_ALL, "all slots hold the experts of a placement before its swap")
X(SAVE_BEFORE_SWAP, "a placement is durable before a slot uses it")
X(SWAP_WHAT_ALL_HOLD, "a restarted coordinator swaps in only what all slots hold")
X(MOVE_ENDS_WITH_ITS_VIEW, "a move that is not saved ends with its view")
