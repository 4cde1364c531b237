# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/fuzz.cmake)

moe_fuzz(fuzz_traceparent SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_traceparent.c USES moe_trace
         MUTATIONS 200000)
