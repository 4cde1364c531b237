# SPDX-License-Identifier: Apache-2.0
moe_test(test_placement SOURCES test_placement.c USES moe_coordinator LABELS coordinator)
moe_test(test_events SOURCES test_events.c USES moe_coordinator LABELS coordinator)
moe_test(test_store SOURCES test_store.c USES moe_coordinator LABELS coordinator)
moe_test(test_weights SOURCES test_weights.c USES moe_coordinator moe_model LABELS coordinator)
moe_test(test_membership SOURCES test_membership.c USES moe_coordinator LABELS coordinator)
moe_test(test_membership_sim SOURCES test_membership_sim.c sim_stream.c USES moe_coordinator
  LABELS coordinator TIMEOUT 240)
moe_test(test_coordinator_service SOURCES test_coordinator_service.c
  USES moe_coordinator moe_model moe_proto LABELS coordinator TIMEOUT 120)

# What workers believe: 2000 schedules; every guard switched off; the long run.
moe_test(test_lease_sim SOURCES test_lease_sim.c sim_stream.c USES moe_coordinator moe_daemon_base
  LABELS coordinator TIMEOUT 120)
add_test(NAME lease_sim_guards COMMAND test_lease_sim --guards --seeds 20000)
set_tests_properties(lease_sim_guards PROPERTIES TIMEOUT 120 LABELS "coordinator;slow")
add_test(NAME lease_sim_long COMMAND test_lease_sim --seeds 100000)
set_tests_properties(lease_sim_long PROPERTIES TIMEOUT 900 LABELS "coordinator;nightly")
