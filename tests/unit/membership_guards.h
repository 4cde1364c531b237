/* SPDX-License-Identifier: Apache-2.0 */
/* Guards (base/guard.h) of the membership machine that views with a live mask hang on, and the
 * promise that breaks without each. X(name, promise); `test_membership_sim --guards` switches each
 * off in turn. */
X(MASK_COVERS, "a view has a copy of every expert")
X(PARTIAL_FOLLOWS, "a view without some experts follows on one with all")
X(PARTIAL_HAS_HALF, "a view without some experts has half of the slots")
X(START_WAITS, "a group that starts waits a lease for its last workers")
X(READY_OF_ALL, "a view is committed when all of its members are ready")
X(LOSS_ENDS_THE_EPOCH, "no view has a member that is lost")
X(GROWTH_KEEPS_MEMBERS, "a view ends for a larger one only if that has all of its members")
X(SUSPECTS_STAY_OUT, "a member that answers no peer does not keep the others from serving")
