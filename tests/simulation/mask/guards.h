/* SPDX-License-Identifier: Apache-2.0 */
/* Guards (base/guard.h) of the masks of a session, and what each is for.
 * X(name, purpose); `mask_sim --guards` switches each off in turn. */

/* kernels/common/masks.c; of MASK_SHRINKS also the model of a coordinator */
X(MASK_SHRINKS, "a slot that is taken again has windows that no late writer knows")
X(STEPS_END_FIRST, "a slot that has taken a mask runs no step of the mask before")
X(EPOCHS_IN_RANGE, "a step uses the rows that its members have stored for it")
X(NOTICE_HAS_EPOCH, "a wait ends for a cause in its epoch")
X(LATER_MASK_LEAVES, "a slot that the mask lacks does not wait for the others")

/* The model: the flags of a window, and when a slot begins */
X(STAMP_HAS_EPOCH, "a step uses the rows that its members have stored for it")
X(LINES_KEEP_ORDER, "a step uses the rows that its members have stored for it")
X(HEADS_HAVE_PARITY, "a slot that has refused a step may be one step ahead")
X(COMMIT_FIRST, "a step runs in an epoch that was committed")
X(READY_OF_ALL, "a commit shows that all have taken the mask")
X(CLEAR_FIRST, "a row without a flag, of a step that has failed, counts in no other step")
X(ALL_ARE_CLEAR, "a slot clears no row of the step that begins")
X(MEET_FIRST, "without a commit, an exchange shows that all have taken the mask")
