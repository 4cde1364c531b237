# SPDX-License-Identifier: Apache-2.0
# What is chosen before kernels run is plain C and tested everywhere; the kernels where they are
# built, and skipped where no Hopper GPU answers.
foreach(choice gemm_choice backward_plan)
  moe_test(test_${choice}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${choice}.c
    USES moe_cuda_plan
    LABELS kernels)
endforeach()
# Stands for the driver's library; a variable of the environment says what it answers.
add_library(fake_nvml MODULE ${CMAKE_CURRENT_LIST_DIR}/fake_nvml.c)
moe_test(test_fabric
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_fabric.c
  USES moe_cuda_plan moe_test_support
  LABELS kernels)
target_compile_definitions(test_fabric PRIVATE FAKE_NVML="$<TARGET_FILE:fake_nvml>")
add_dependencies(test_fabric fake_nvml)
moe_test(test_gpus
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_gpus.c
  USES moe_cuda_plan moe_common moe_test_support
  LABELS kernels)
if(MOE_HAVE_CUDA)
  moe_test(test_ggemm
    SOURCES ${PROJECT_SOURCE_DIR}/tests/gpu/test_ggemm.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_fixture.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_reference.cu
    USES moe_cuda
    TIMEOUT 120
    LABELS gpu)
  moe_test(test_wgrad
    SOURCES ${PROJECT_SOURCE_DIR}/tests/gpu/test_wgrad.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_fixture.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/wgrad_reference.cu
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_reference.cu
    USES moe_cuda
    TIMEOUT 120
    LABELS gpu)
  foreach(test test_ggemm test_wgrad)
    target_include_directories(${test} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    set_tests_properties(${test} PROPERTIES SKIP_RETURN_CODE 77)
  endforeach()

  # Counts calls of the CUDA runtime by wrapping them.
  add_executable(test_steady ${PROJECT_SOURCE_DIR}/tests/gpu/test_steady.c)
  target_link_libraries(test_steady PRIVATE moe_cuda moe_conformance_group moe_strict)
  target_include_directories(test_steady PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  foreach(call cudaMalloc cudaFree cudaHostAlloc cudaFreeHost cudaStreamSynchronize
               cudaDeviceSynchronize cudaEventSynchronize cudaMemcpy cudaStreamBeginCapture
               cudaGraphInstantiate cudaGraphLaunch cudaLaunchKernel)
    target_link_options(test_steady PRIVATE -Wl,--wrap=${call})
  endforeach()
  add_test(NAME test_steady COMMAND test_steady)
  set_tests_properties(test_steady PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 120 LABELS gpu)
endif()
