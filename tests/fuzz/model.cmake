# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/fuzz.cmake)

file(GLOB golden_configs ${PROJECT_SOURCE_DIR}/tests/golden/models/*/config.json
     ${PROJECT_SOURCE_DIR}/tests/golden/quantised/*/config.json
     ${PROJECT_SOURCE_DIR}/tests/golden/numpy/*/config.json
     ${PROJECT_SOURCE_DIR}/tests/golden/uncommon/*/config.json)
moe_fuzz(fuzz_safetensors SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_safetensors.c USES moe_model)
moe_fuzz(fuzz_index SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_index.c USES moe_model)
moe_fuzz(fuzz_config SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_config.c
         USES moe_model moe_quant
         SEEDS ${golden_configs})
moe_fuzz(fuzz_digests SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_digests.c
         USES moe_coordinator moe_model)
