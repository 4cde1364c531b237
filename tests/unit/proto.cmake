# SPDX-License-Identifier: Apache-2.0
add_test(NAME proto_lint COMMAND ${MOE_PYTHON} -B ${CMAKE_CURRENT_SOURCE_DIR}/proto_lint.py
                                 ${MOE_DESCRIPTOR_SET})
set_tests_properties(proto_lint PROPERTIES TIMEOUT 60)
