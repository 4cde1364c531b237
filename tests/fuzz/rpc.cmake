# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/fuzz.cmake)

moe_fuzz(fuzz_rpc_frame SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_rpc_frame.c USES moe_rpc moe_proto
         MUTATIONS 200000)
moe_fuzz(fuzz_rpc_details SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_rpc_details.c USES moe_rpc
         MUTATIONS 200000)
moe_fuzz(fuzz_rpc_unpack SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_rpc_unpack.c USES moe_rpc moe_proto
         MUTATIONS 200000)
moe_fuzz(fuzz_frames SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_frames.c USES moe_listener
         MUTATIONS 100000)
