# SPDX-License-Identifier: Apache-2.0
# The Python package against fake and training workers, the installed libmoeclient, and
# moectl's command line.
moe_integration_test(python)
# The same through grpcio where the extension is built, and the extension compared with grpcio.
if(MOE_HAVE_PYTHON_NATIVE AND NOT MOE_TSAN)
  add_test(NAME integration_python_grpc
    COMMAND ${MOE_PYTHON} -B ${CMAKE_CURRENT_SOURCE_DIR}/test_python.py
            ${PROJECT_BINARY_DIR} ${MOE_GOLDEN_MODELS})
  set_tests_properties(integration_python_grpc PROPERTIES TIMEOUT 120 LABELS integration
    ENVIRONMENT "PYTHONUNBUFFERED=1;MOED_TRANSPORT=grpc")
  moe_integration_test(python_native TIMEOUT 300)
  moe_integration_test(python_regions TIMEOUT 300)
  if(MOE_SANITIZE) # Python lacks the sanitizer's runtime, and leaks by design
    execute_process(COMMAND ${CMAKE_C_COMPILER} -print-file-name=libasan.so
      OUTPUT_VARIABLE asan OUTPUT_STRIP_TRAILING_WHITESPACE)
    execute_process(COMMAND ${CMAKE_C_COMPILER} -print-file-name=libstdc++.so
      OUTPUT_VARIABLE cxx OUTPUT_STRIP_TRAILING_WHITESPACE)
    set_tests_properties(integration_python_native integration_python_regions
      integration_token_routing PROPERTIES
      ENVIRONMENT "PYTHONUNBUFFERED=1;LD_PRELOAD=${asan}:${cxx};ASAN_OPTIONS=detect_leaks=0")
  endif()
endif()
moe_integration_test(libmoeclient)
moe_integration_test(install SLOW)
moe_integration_test(systemd)
moe_integration_test(moectl SLOW TIMEOUT 300)
moe_integration_test(up SLOW TIMEOUT 300)
moe_integration_test(progress)
moe_integration_test(guide SLOW TIMEOUT 300)
if(MOE_HAVE_UCX)
  set_tests_properties(integration_guide PROPERTIES
    ENVIRONMENT "PYTHONUNBUFFERED=1;MOE_TEST_UCX=1")
endif()
moe_integration_test(python_training SLOW)
moe_integration_test(torch_training SLOW)
moe_integration_test(resumed_training SLOW TIMEOUT 300)
moe_integration_test(torch_compile TIMEOUT 300)
moe_integration_test(aux_loss)
set_tests_properties(integration_torch_training integration_resumed_training
  integration_torch_compile PROPERTIES
  SKIP_REGULAR_EXPRESSION "OK .skipped=")
