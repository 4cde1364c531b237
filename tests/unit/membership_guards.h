/* SPDX-License-Identifier: Apache-2.0 */
/* Guards (base/guard.h) of the membership machine that views with a live mask and changes of the
 * group's size hang on, and the promise that breaks without each. X(name, promise);
 * `test_membership_sim --guards` switches each off in turn. */
X(MASK_COVERS, "a view has a copy of every expert")
X(PARTIAL_FOLLOWS, "a view without some experts follows on one with all")
X(PARTIAL_HAS_HALF, "a view without some experts has half of the slots")
X(START_WAITS, "a group that starts waits a lease for its last workers")
X(READY_OF_ALL, "a view is committed when all of its members are ready")
X(LOSS_ENDS_THE_EPOCH, "no view has a member that is lost")
X(GROWTH_KEEPS_MEMBERS, "a view ends for a larger one only if that has all of its members")
X(SCALE_LOADS_FIRST, "a member has loaded the placement of its view")
X(PLACEMENT_IS_DURABLE, "a worker is drained for a smaller group once that is durable")
X(VERSION_IS_SAVED, "a version names one placement, also after a restart")
X(LOSS_UNDOES_SCALING, "a scaling ends")
X(LEAVE_TOGETHER, "a worker that lost its place leaves when it has drained")
X(SPARES_TRY_NOTHING, "attempts are bounded")
X(SUSPECTS_STAY_OUT, "a member that answers no peer does not keep the others from serving")
X(MASK_HAS_FEWER, "a mask has fewer slots than the one before")
X(MASK_IS_WHOLE, "a mask has or lacks the slots of a domain together")
X(MASK_KEEPS_PROCESSES, "a mask keeps the processes of its session")
X(MASK_OF_A_VIEW, "a mask is of a session that has served")
X(PREPARE_IS_ANSWERED, "the others serve long before the leases of the lost ones end")
X(LATER_REPORTS_COUNT, "a dead member loses its slot when its peers miss it")
