# SPDX-License-Identifier: Apache-2.0
# Memory that clients share: the registry, and rings with real threads.
moe_test(test_regions SOURCES test_regions.c USES moe_regions LABELS worker)
moe_test(test_ring SOURCES test_ring.c USES moe_regions Threads::Threads LABELS worker TIMEOUT 120)
moe_test(test_region_tickets SOURCES test_region_tickets.c USES moe_regions LABELS worker)
# The same end to end: libmoeclient, or a client that breaks the rules, and a service.
foreach(part client_regions client_device device_completion region_service)
  moe_test(test_${part} SOURCES test_${part}.c shared_fixture.c service_fixture.c worker_fixture.c
           engine_hooks.c all_experts.c
           USES moe_client moe_regions moe_worker_core moe_cpu moe_oracle Threads::Threads m
           LABELS worker TIMEOUT 120)
  target_compile_definitions(test_${part} PRIVATE
    MOE_GOLDEN_MODELS="${PROJECT_SOURCE_DIR}/tests/golden/models")
endforeach()
