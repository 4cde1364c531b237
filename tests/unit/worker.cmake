moe_test(test_batcher SOURCES test_batcher.c USES moe_worker_core)
foreach(name engine engine_failures staging service)
  if(EXISTS ${CMAKE_CURRENT_LIST_DIR}/test_${name}.c)
    moe_test(test_${name} SOURCES test_${name}.c worker_fixture.c
             USES moe_worker_core moe_cpu moe_oracle)
  endif()
endforeach()
include(worker_group.cmake OPTIONAL)
