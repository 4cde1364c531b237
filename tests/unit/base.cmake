# SPDX-License-Identifier: Apache-2.0
add_test(NAME concurrency_page COMMAND ${MOE_PYTHON} -B
  ${CMAKE_CURRENT_SOURCE_DIR}/concurrency_page.py ${PROJECT_SOURCE_DIR})
set_tests_properties(concurrency_page PROPERTIES LABELS base)
# Skipped where clang 19 is missing.
add_test(NAME thread_safety COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/thread_safety.sh
  ${PROJECT_BINARY_DIR}/rooms/base ${MOE_THREAD_SAFETY})
set_tests_properties(thread_safety PROPERTIES SKIP_RETURN_CODE 77 LABELS base)
foreach(part base options endpoint lease local metrics progress thread_pool daemon memory notify
        restart transfer)
  moe_test(test_${part} SOURCES test_${part}.c USES moe_daemon_base LABELS base)
endforeach()
