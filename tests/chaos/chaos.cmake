# SPDX-License-Identifier: Apache-2.0
# Faults of whole hosts, of the coordinator and of etcd, with real daemons. The partition needs
# network namespaces, the leader etcd, and overcommit control groups; they are skipped where there
# is none. The long forms repeat the scenes.
foreach(scene partition coordinator leader replicas partial rolling elastic mixed overcommit)
  set(command ${MOE_PYTHON} -B ${PROJECT_SOURCE_DIR}/tests/chaos/test_${scene}.py
    ${PROJECT_BINARY_DIR} ${MOE_GOLDEN_MODELS})
  add_test(NAME chaos_${scene} COMMAND ${command})
  set_tests_properties(chaos_${scene} PROPERTIES TIMEOUT 600 LABELS "integration;slow")
  add_test(NAME chaos_${scene}_long COMMAND ${command} --long)
  set_tests_properties(chaos_${scene}_long PROPERTIES TIMEOUT 1500 LABELS "integration;nightly")
endforeach()
set_tests_properties(chaos_mixed_long PROPERTIES TIMEOUT 3000)
set_tests_properties(chaos_partition chaos_partition_long chaos_leader chaos_leader_long
  chaos_overcommit chaos_overcommit_long PROPERTIES SKIP_RETURN_CODE 77)
# Its processes have half of the processors, and must get that.
set_tests_properties(chaos_overcommit PROPERTIES RUN_SERIAL ON)
