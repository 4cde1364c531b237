# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/fuzz.cmake)

moe_fuzz(fuzz_request SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_request.c USES moe_worker_core
         MUTATIONS 100000)
moe_fuzz(fuzz_backward SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_backward.c USES moe_worker_core
         MUTATIONS 100000)
moe_fuzz(fuzz_ring SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_ring.c USES moe_regions)
moe_fuzz(fuzz_regions SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_regions.c
         USES moe_regions moe_rpc moe_proto)
