# SPDX-License-Identifier: Apache-2.0
# libmoeclient against fake workers, and the pure parts of moectl.
foreach(name client client_spread client_rehomed client_stream client_training)
  moe_test(test_${name}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${name}.c ${CMAKE_CURRENT_LIST_DIR}/client_fixture.c
            ${CMAKE_CURRENT_LIST_DIR}/fake_expert.c
    USES moe_client moe_rpc moe_proto moe_base
    LABELS client)
endforeach()
moe_test(test_histogram
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_histogram.c ${CMAKE_CURRENT_LIST_DIR}/client_fixture.c
  USES moe_moectl_io moe_client moe_rpc moe_proto moe_base
  LABELS client)
