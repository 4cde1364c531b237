# SPDX-License-Identifier: Apache-2.0
moe_test(test_sequencer SOURCES test_sequencer.c USES moe_schedule)
moe_test(test_shm_ring SOURCES test_shm_ring.c USES moe_links)
moe_test(test_pulse SOURCES test_pulse.c USES moe_links)
moe_test(test_beats SOURCES test_beats.c USES moe_links)
moe_test(test_peers SOURCES test_peers.c USES moe_links moe_rpc moe_proto moe_daemon_base)
moe_test(test_group SOURCES test_group.c scripted_coordinator.c
  USES moe_group moe_rpc moe_proto moe_daemon_base)
moe_test(test_resident SOURCES test_resident.c USES moe_worker_core moe_cpu moe_test_support)
target_compile_definitions(test_resident PRIVATE
  MOE_GOLDEN_MODEL="${PROJECT_SOURCE_DIR}/tests/golden/models/qwen3_moe"
  MOE_NUMPY_DIR="${PROJECT_SOURCE_DIR}/tests/golden/numpy")
moe_test(test_models SOURCES test_models.c all_experts.c USES moe_models moe_cpu moe_test_support)
target_compile_definitions(test_models PRIVATE
  MOE_GOLDEN_MODELS="${PROJECT_SOURCE_DIR}/tests/golden/models")
moe_test(test_worker SOURCES test_worker.c USES moe_worker_core moe_coordinator moe_cpu m
  TIMEOUT 120)
target_compile_definitions(test_worker PRIVATE
  MOE_GOLDEN_MODEL="${PROJECT_SOURCE_DIR}/tests/golden/models/qwen3_moe")
