# SPDX-License-Identifier: Apache-2.0
moe_test(test_placement SOURCES test_placement.c USES moe_coordinator LABELS coordinator)
moe_test(test_events SOURCES test_events.c USES moe_coordinator LABELS coordinator)
moe_test(test_store SOURCES test_store.c USES moe_coordinator LABELS coordinator)
moe_test(test_election SOURCES test_election.c USES moe_store LABELS coordinator)
moe_test(test_store_etcd SOURCES test_store_etcd.c USES moe_store LABELS coordinator TIMEOUT 180)
set_tests_properties(test_store_etcd PROPERTIES SKIP_RETURN_CODE 77)
moe_test(test_weights SOURCES test_weights.c USES moe_coordinator moe_model LABELS coordinator)
moe_test(test_membership SOURCES test_membership.c membership_fixture.c
  USES moe_coordinator LABELS coordinator)
moe_test(test_membership_slots SOURCES test_membership_slots.c membership_fixture.c
  USES moe_coordinator LABELS coordinator)
moe_test(test_membership_training SOURCES test_membership_training.c membership_fixture.c
  USES moe_coordinator LABELS coordinator)
moe_test(test_scale SOURCES test_scale.c USES moe_coordinator LABELS coordinator)
moe_test(test_moved SOURCES test_moved.c USES moe_coordinator LABELS coordinator)
foreach(part service digests streams models)
  moe_test(test_coordinator_${part}
    SOURCES test_coordinator_${part}.c coordinator_fixture.c coordinator_workers.c
    USES moe_coordinator moe_model moe_proto LABELS coordinator TIMEOUT 120)
endforeach()

# The membership machine, compiled here with MOE_SIMULATION: its guards can be switched off.
set(coordinator ${PROJECT_SOURCE_DIR}/daemon/coordinator)
moe_test(test_membership_sim
  SOURCES test_membership_sim.c membership_world.c membership_workers.c sim_stream.c
          ${coordinator}/membership.c
          ${coordinator}/members.c ${coordinator}/scale.c ${coordinator}/formation.c
          ${coordinator}/report.c
  USES moe_coordinator LABELS coordinator TIMEOUT 240)
target_compile_definitions(test_membership_sim PRIVATE MOE_SIMULATION
                                                       MOE_GUARD_LIST="membership_guards.h")
target_include_directories(test_membership_sim PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
add_test(NAME membership_sim_guards COMMAND test_membership_sim --guards --seeds 20000)
set_tests_properties(membership_sim_guards PROPERTIES TIMEOUT 600 LABELS "coordinator;slow")

# The machine of added models, compiled here with MOE_SIMULATION: its guards can be switched off.
moe_test(test_models_sim
  SOURCES test_models_sim.c ${coordinator}/models.c ${coordinator}/model_steps.c
          ${coordinator}/model_plan.c
  USES moe_coordinator LABELS coordinator TIMEOUT 240)
target_compile_definitions(test_models_sim PRIVATE MOE_SIMULATION
                                                   MOE_GUARD_LIST="models_guards.h")
target_include_directories(test_models_sim PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
add_test(NAME models_sim_guards COMMAND test_models_sim --guards --seeds 4000)
set_tests_properties(models_sim_guards PROPERTIES TIMEOUT 600 LABELS "coordinator;slow")
add_test(NAME models_sim_long COMMAND test_models_sim --seeds 20000)
set_tests_properties(models_sim_long PROPERTIES TIMEOUT 1800 LABELS "coordinator;nightly")

# The machine of moves, in the same way.
moe_test(test_moves_sim SOURCES test_moves_sim.c ${coordinator}/moves/moves.c
  USES moe_coordinator moe_schedule LABELS coordinator TIMEOUT 240)
target_compile_definitions(test_moves_sim PRIVATE MOE_SIMULATION
                                                  MOE_GUARD_LIST="moves_guards.h")
target_include_directories(test_moves_sim PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
add_test(NAME moves_sim_guards COMMAND test_moves_sim --guards --seeds 20000)
set_tests_properties(moves_sim_guards PROPERTIES TIMEOUT 600 LABELS "coordinator;slow")
add_test(NAME moves_sim_long COMMAND test_moves_sim --seeds 20000)
set_tests_properties(moves_sim_long PROPERTIES TIMEOUT 1800 LABELS "coordinator;nightly")

# What workers believe: 2000 schedules; every guard switched off; the long run.
moe_test(test_lease_sim SOURCES test_lease_sim.c sim_stream.c USES moe_coordinator moe_daemon_base
  LABELS coordinator TIMEOUT 120)
add_test(NAME lease_sim_guards COMMAND test_lease_sim --guards --seeds 20000)
set_tests_properties(lease_sim_guards PROPERTIES TIMEOUT 120 LABELS "coordinator;slow")
add_test(NAME lease_sim_long COMMAND test_lease_sim --seeds 100000)
set_tests_properties(lease_sim_long PROPERTIES TIMEOUT 900 LABELS "coordinator;nightly")
moe_test(test_rebalancer SOURCES test_rebalancer.c USES moe_balance m LABELS coordinator)
moe_test(test_plan SOURCES test_plan.c USES moe_balance m LABELS coordinator)
