/* SPDX-License-Identifier: Apache-2.0 */
/* Every guard (base/guard.h) of the pure rooms that the group simulator links, and the promise that
 * breaks without it. X(name, promise); `group_sim --guards` switches each off in turn. */

/* schedule/sequencer.c */
X(EXCLUSIVE_RUNS_ALONE, "no ticket comes until all slots have run an exclusive one")
X(BLOCKED_KINDS_WAIT, "no weight update is ordered while a checkpoint is read from the trainers")
X(LATER_CALLS_WAIT, "what came after a call that is blocked does not pass it")

/* training/ledger.c */
X(CONTENT_IS_COMPARED, "a call is answered with the outcome of the same call")
X(FORGOTTEN_CALLS_STAY_DONE, "a call that a session has forgotten is not run again")
X(FORGOTTEN_SESSIONS_STAY_DONE, "a call of a session that was forgotten is not run again")

/* training/recovery.c */
X(ALL_PARTS_ARE_THERE, "a step uses all parts of a gradient")
X(GRADIENTS_ARE_WHOLE, "a step uses no gradients that a lost slot has left undefined")
X(ANSWERS_ARE_KEPT, "an answered call is in each later state of its lineage")
X(ONLY_WHAT_IS_SAVED, "a slot that joins has the state of the others")
X(AHEAD_IS_THE_STATE, "a slot that has read a checkpoint ahead joins with no other state")

/* training/job_machine.c */
X(ONE_JOB, "a job begins when no other is under way")
X(ORPHAN_GOES_FIRST, "a job begins when nothing runs that an earlier view began")
X(ORPHAN_IS_UNDONE, "what a lost view began to write is removed")
X(ORPHAN_LETS_GO, "trainers stay as long as a copy is made of them")
X(JOIN_THE_SAME, "a call joins a job of the same content only")
X(ALL_SLOTS_ENDED, "a part begins when all slots have ended the one before")
X(EVERY_FAILURE_COUNTS, "a part that failed on one slot has failed")
X(ALL_CALLERS_LEFT, "a job is called off when no caller waits on any slot")
X(COMMIT_COUNTS, "a job that was committed is not called off")
X(WEIGHTS_STAY_WHILE_COPIED, "weights stay the same while they are copied")
X(WEIGHTS_STAY_WITHOUT_COPY, "weights stay the same while files are written from them")
X(UNDO_WHAT_WAS_WRITTEN, "a job that failed leaves no files")
X(KEEP_BEFORE_TIDY, "no checkpoint goes that some slot would recover from")
X(RECORD_WHAT_IS_DONE, "a call is recorded when it was done")
