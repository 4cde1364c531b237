# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/fuzz.cmake)

# Answers of a hostile or broken server.
moe_fuzz(fuzz_client_answer SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_client_answer.c
         USES moe_client moe_rpc moe_proto moe_base MUTATIONS 100000)
moe_fuzz(fuzz_client_gradients SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_client_gradients.c
         USES moe_client moe_rpc moe_proto moe_base MUTATIONS 100000)
target_include_directories(fuzz_client_gradients PRIVATE ${PROJECT_SOURCE_DIR}/client/src)
target_include_directories(fuzz_client_answer PRIVATE ${PROJECT_SOURCE_DIR}/client/src)
