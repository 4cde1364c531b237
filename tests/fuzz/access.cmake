# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/fuzz.cmake)

moe_fuzz(fuzz_access SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_access.c USES moe_access)
