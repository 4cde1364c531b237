# SPDX-License-Identifier: Apache-2.0
# What is chosen before kernels run is plain C and tested everywhere; the kernels where they are
# built, and skipped where no Hopper GPU answers.
foreach(choice gemm_choice graph_key backward_plan)
  moe_test(test_${choice}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${choice}.c
    USES moe_cuda_plan
    LABELS kernels)
endforeach()
moe_test(test_group_size
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_group_size.c
  USES moe_cuda_plan moe_common moe_test_support
  LABELS kernels)
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
  moe_test(test_packed
    SOURCES ${PROJECT_SOURCE_DIR}/tests/gpu/test_packed.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/packed_problem.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_fixture.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_reference.cu
    USES moe_cuda m
    TIMEOUT 120
    LABELS gpu)
  moe_test(test_placing
    SOURCES ${PROJECT_SOURCE_DIR}/tests/gpu/test_placing.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/placed_reference.cu
            ${PROJECT_SOURCE_DIR}/tests/gpu/packed_problem.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_fixture.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_reference.cu
    USES moe_cuda m
    TIMEOUT 120
    LABELS gpu)
  moe_test(test_quantise
    SOURCES ${PROJECT_SOURCE_DIR}/tests/gpu/test_quantise.c
            ${PROJECT_SOURCE_DIR}/tests/gpu/ggemm_fixture.c
    USES moe_cuda m
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
  moe_test(test_device_progress
    SOURCES ${PROJECT_SOURCE_DIR}/tests/gpu/test_device_progress.c
    USES moe_cuda
    TIMEOUT 120
    LABELS gpu)
  foreach(test test_ggemm test_packed test_placing test_quantise test_wgrad test_device_progress)
    target_include_directories(${test} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    set_tests_properties(${test} PROPERTIES SKIP_RETURN_CODE 77)
  endforeach()

  # Counts calls of the CUDA runtime by wrapping them.
  add_executable(test_steady ${PROJECT_SOURCE_DIR}/tests/gpu/test_steady.c)
  target_link_libraries(test_steady PRIVATE moe_cuda moe_conformance_group moe_strict)
  target_include_directories(test_steady PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  foreach(call cudaMalloc cudaFree cudaHostAlloc cudaFreeHost cudaStreamSynchronize
               cudaDeviceSynchronize cudaEventSynchronize cudaMemcpy cudaStreamBeginCapture
               cudaGraphInstantiate cudaGraphLaunch cudaLaunchKernel __cudaLaunchKernel
               cudaMemcpyAsync)
    target_link_options(test_steady PRIVATE -Wl,--wrap=${call})
  endforeach()
  add_test(NAME test_steady COMMAND test_steady)
  set_tests_properties(test_steady PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 120 LABELS gpu)

  # libmoeclient_cuda's sessions with a stand-in for the runtime.
  moe_test(test_stream_session
    SOURCES test_stream_session.c fake_cuda_runtime.c shared_fixture.c service_fixture.c
            worker_fixture.c engine_hooks.c all_experts.c
            ${PROJECT_SOURCE_DIR}/client/cuda/stream.c
    USES moe_client moe_regions moe_worker_core moe_cpu moe_oracle Threads::Threads m
    LABELS worker TIMEOUT 60)
  target_include_directories(test_stream_session PRIVATE ${PROJECT_SOURCE_DIR}/client/cuda
    ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(test_stream_session PRIVATE
    MOE_GOLDEN_MODELS="${PROJECT_SOURCE_DIR}/tests/golden/models")

  # A client of CUDA streams, for tests/gpu/streams.py.
  add_executable(stream_client ${PROJECT_SOURCE_DIR}/tests/gpu/stream_client.c
    ${PROJECT_SOURCE_DIR}/tests/gpu/stream_kernels.cu)
  target_link_libraries(stream_client PRIVATE moeclient_cuda moeclient moe_base moe_test_support
    CUDA::cudart_static Threads::Threads moe_strict)
  target_include_directories(stream_client PRIVATE ${CUDAToolkit_INCLUDE_DIRS}
    $<TARGET_PROPERTY:moe_client,INTERFACE_INCLUDE_DIRECTORIES>)

  # Memory of other processes, and what the backend says of wrong descriptors and sizes.
  moe_test(test_foreign
    SOURCES ${PROJECT_SOURCE_DIR}/tests/gpu/test_foreign.c
    USES moe_cuda
    TIMEOUT 60
    LABELS gpu)
  target_include_directories(test_foreign PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  set_tests_properties(test_foreign PROPERTIES SKIP_RETURN_CODE 77)

  # A stand-in for NCCL: several slots on one GPU (tests/gpu/run.sh --same-gpu).
  add_library(moe_one_gpu INTERFACE)
  target_sources(moe_one_gpu INTERFACE ${PROJECT_SOURCE_DIR}/tests/gpu/one_gpu.c)
  target_include_directories(moe_one_gpu SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(moe_one_gpu INTERFACE moe_cuda moe_common)
  foreach(call cudaGetDeviceProperties cudaSetDevice cudaGetDeviceCount moe_session_check_gpus
               moe_cuda_window_read_peers)
    target_link_options(moe_one_gpu INTERFACE -Wl,--wrap=${call})
  endforeach()

  # The backend with it.
  add_library(backend_cuda_one_gpu MODULE ${PROJECT_SOURCE_DIR}/kernels/cuda/module.c)
  target_link_libraries(backend_cuda_one_gpu PRIVATE moe_one_gpu moe_strict
    -Wl,--version-script=${PROJECT_SOURCE_DIR}/kernels/cuda/module.map -Wl,-z,defs)
  set_target_properties(backend_cuda_one_gpu PROPERTIES PREFIX "" OUTPUT_NAME backend_cuda
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/gpu/one_gpu)
endif()
