/* SPDX-License-Identifier: Apache-2.0 */
/* Every guard (base/guard.h) of the rings and regions, and the promise that breaks without it.
 * X(name, promise); `ring_sim --guards` switches each off in turn. */

/* schedule/completion.h */
X(GOOD_NEEDS_EARLIER_PARTS, "a device completes no request with an earlier part that is not good")
X(GOOD_NEEDS_THE_LAST_PART, "a device completes a request at its last part")

/* regions/server.c */
X(ENTRIES_TAKE_TURNS, "an entry's next request waits until the daemon is done with the last one")

/* regions/caller.c */
X(RESULT_OF_THIS_REQUEST, "the result of an old request ends no new one")
X(ABANDONED_ENTRIES_WAIT, "outputs of an abandoned request stay until the daemon is done")
X(EVERY_WAIT_ENDS, "a wait ends when the daemon has died")

/* regions/device_caller.h */
X(DEVICE_RESULT_OF_THIS, "a stream's wait ends with the result of its request")
X(DEVICE_ABANDONED_WAITS, "a device submits nothing in an entry that it gave up")

/* regions/registry.c */
X(REGIONS_OF_THE_CLIENT, "a client uses no memory of another")
X(REGIONS_ARE_OPEN, "a region that is closing comes to an end")
X(REGIONS_STAY_WHILE_USED, "a region is mapped as long as a request uses it")
X(TENSORS_END_IN_TIME, "a tensor lies inside of its region")
X(OUTPUTS_ARE_APART, "no two requests in flight write the same byte")
X(MEMORY_IS_ONE_REGION, "no two regions of a client are the same memory")
X(CLIENTS_STAY_UNTIL_EMPTY, "a connection ends after the last access to the client's memory")

/* The simulation's: rules for the device and the threads of a daemon, which call the rooms above.
 */
X(GOOD_NEEDS_THE_STEP, "a device completes no request of a step that failed")
X(GOOD_NEEDS_ALL_TOKENS, "a device completes no request with a token that failed")
X(COMPLETED_MEMORY_IS_FREE, "memory of a request that a device has completed serves the next one")
X(A_REQUEST_IS_READ_ONCE, "the daemon uses what it has checked")
X(A_RUN_READS_THE_SNAPSHOT, "a step that runs again uses the rows that were checked")
X(A_NEW_VIEW_WAITS, "no step of an old view writes once the next view runs")
X(THE_DEVICE_DECIDES, "a step that has succeeded does not run again")
X(ROWS_COME_FIRST, "a completion comes after the rows")
X(ENDS_ARE_SIGNALLED, "a stream that sleeps sees the end of its request")
