# SPDX-License-Identifier: Apache-2.0
moe_test(test_placement SOURCES test_placement.c USES moe_coordinator LABELS coordinator)
moe_test(test_store SOURCES test_store.c USES moe_coordinator LABELS coordinator)
moe_test(test_membership SOURCES test_membership.c USES moe_coordinator LABELS coordinator)
moe_test(test_membership_sim SOURCES test_membership_sim.c USES moe_coordinator LABELS coordinator
  TIMEOUT 240)
moe_test(test_coordinator_service SOURCES test_coordinator_service.c USES moe_coordinator moe_proto
  LABELS coordinator TIMEOUT 120)
