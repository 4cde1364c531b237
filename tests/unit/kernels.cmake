# Compute half of the CPU backend against the double-precision oracle.
foreach(part pool layer router gemm ffn)
  moe_test(test_kernels_${part}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_kernels_${part}.c
            ${CMAKE_CURRENT_LIST_DIR}/kernels_fixture.c
    USES moe_cpu moe_oracle
    LABELS kernels)
endforeach()
