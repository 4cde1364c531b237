# SPDX-License-Identifier: Apache-2.0
# Compute half of the CPU backend against the double-precision oracle.
foreach(part pool layer router gemm packed packing w8a8 ffn latent training)
  moe_test(test_kernels_${part}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_kernels_${part}.c
            ${CMAKE_CURRENT_LIST_DIR}/kernels_fixture.c
    USES moe_cpu moe_oracle
    LABELS kernels)
endforeach()

# The oracle of training against differences of its forward pass, and against numbers by hand.
foreach(part backward training)
  moe_test(test_oracle_${part}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_oracle_${part}.c
    USES moe_oracle moe_test_support
    LABELS kernels)
endforeach()

# Settings against the tables of options.
moe_test(test_backend_options
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_backend_options.c
  USES moe_backends moe_cuda_plan moe_common
  LABELS kernels)

# Sessions that go on without a lost slot.
moe_test(test_masks
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_masks.c
  USES moe_common
  LABELS kernels)

# Who shares memory with whom.
moe_test(test_reach
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_reach.c
  USES moe_common
  LABELS kernels)

# Messages of the network transport.
if(MOE_HAVE_UCX)
  moe_test(test_network_messages
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_network_messages.c
    USES moe_cpu_network
    LABELS kernels)
endif()

# Rules of training for both backends.
moe_test(test_training_rules
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_training_rules.c
  USES moe_common
  LABELS kernels)

# The cache of retained activations.
moe_test(test_activation_cache
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_activation_cache.c
  USES moe_common
  LABELS kernels)

# The room that a step asks for there.
moe_test(test_activation_sizing
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_activation_sizing.c
  USES moe_common
  LABELS kernels)

# Domain maps and the plan of a pass, against a naive walk over whole groups.
foreach(part domains dispatch_plan)
  moe_test(test_${part}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${part}.c
    USES moe_common moe_test_support
    LABELS kernels)
endforeach()
