# SPDX-License-Identifier: Apache-2.0
include(${CMAKE_CURRENT_LIST_DIR}/fuzz.cmake)

moe_fuzz(fuzz_log_line SOURCES ${CMAKE_CURRENT_LIST_DIR}/fuzz_log_line.c
         USES moe_daemon_base PkgConfig::JANSSON)
