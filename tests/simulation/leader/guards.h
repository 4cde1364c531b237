/* SPDX-License-Identifier: Apache-2.0 */
/* Every guard (base/guard.h) of the election and of the writes in etcd, and the promise that breaks
 * without it. X(name, promise); `leader_sim --guards` switches each off in turn. */

/* store/election.c */
X(LEADS_IN_ITS_LEASE, "a leader stops before etcd can remove its key")

/* The simulation's: rules for the calls that daemon/store makes. */
X(MARGIN, "the leader's own count of its lease is shorter by 15 %, and not by 8 %")
X(SENT, "a lease runs from when the renewal was sent, and not from its answer")
X(KEY_IS_ABSENT, "only the absence of the leader's key lets a process lead")
X(WRITES_NEED_THE_KEY, "a write needs the leader's key at its revision")
X(WRITES_FOLLOW, "a late write of the same leader does not come after a later one")
X(READ_AS_THE_LEADER, "a leader reads the state after it has the key")
