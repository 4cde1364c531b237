# SPDX-License-Identifier: Apache-2.0
# The request path of the worker, on the CPU backend in a group of one.
moe_test(test_batcher SOURCES test_batcher.c USES moe_schedule LABELS worker)
moe_test(test_ledger SOURCES test_ledger.c USES moe_training LABELS worker TIMEOUT 120)
moe_test(test_recovery SOURCES test_recovery.c USES moe_training LABELS worker)
moe_test(test_activation_index SOURCES test_activation_index.c USES moe_activations LABELS worker)
moe_test(test_step_metrics SOURCES test_step_metrics.c USES moe_engine LABELS worker)
moe_test(test_row_metrics SOURCES test_row_metrics.c USES moe_engine LABELS worker)
moe_test(test_pass_store SOURCES test_pass_store.c USES moe_activations LABELS worker)
moe_test(test_fence SOURCES test_fence.c USES moe_checkpoint moe_daemon_base LABELS worker)
foreach(part training_engine retain_engine copying_engine gradients)
  moe_test(test_${part} SOURCES test_${part}.c training_fixture.c training_script.c engine_hooks.c
           USES moe_worker_core moe_test_clock LABELS worker)
endforeach()
foreach(part engine engine_models engine_failures engine_health staging)
  moe_test(test_${part} SOURCES test_${part}.c worker_fixture.c engine_hooks.c
           USES moe_worker_core moe_cpu moe_oracle m LABELS worker)
endforeach()
moe_test(test_step_slot SOURCES test_step_slot.c USES moe_engine moe_cpu LABELS worker)
# The same with an engine that spins after a step: briefly, so that it also sleeps, and
# for so long that it does not.
foreach(part engine engine_failures training_engine retain_engine copying_engine)
  foreach(spin 100 1000000)
    add_test(NAME test_${part}_spin_${spin} COMMAND test_${part})
    set_tests_properties(test_${part}_spin_${spin} PROPERTIES TIMEOUT 120 LABELS worker
      ENVIRONMENT "MOE_TEST_SPIN_US=${spin}")
  endforeach()
endforeach()
foreach(part service service_input service_token_ids service_stream service_models)
  moe_test(test_${part} SOURCES test_${part}.c service_fixture.c worker_fixture.c engine_hooks.c
           all_experts.c USES moe_worker_core moe_cpu moe_oracle m LABELS worker TIMEOUT 120)
  target_compile_definitions(test_${part} PRIVATE
    MOE_GOLDEN_MODELS="${PROJECT_SOURCE_DIR}/tests/golden/models")
endforeach()
include(worker_group.cmake)
