# SPDX-License-Identifier: Apache-2.0
include_guard()

# One fuzz target = one ctest test that mutates its seeds a fixed number of times (driver.c); with
# -DMOE_FUZZ=ON (clang) the same source becomes a libFuzzer program.
# At night another sequence with 100 times as many mutations runs.
#   moe_fuzz(NAME SOURCES a.c ... USES rooms ... [SEEDS files ...] [MUTATIONS n] [TIMEOUT s])
function(moe_fuzz name)
  cmake_parse_arguments(FUZZ "" "MUTATIONS;TIMEOUT" "SOURCES;USES;SEEDS" ${ARGN})
  if(NOT FUZZ_MUTATIONS)
    set(FUZZ_MUTATIONS 20000)
  endif()
  if(NOT FUZZ_TIMEOUT)
    set(FUZZ_TIMEOUT 120)
  endif()
  add_executable(${name} ${FUZZ_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/fuzz)
  target_link_libraries(${name} PRIVATE ${FUZZ_USES} moe_strict)
  if(MOE_FUZZ)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    set(seeds "")
    if(FUZZ_SEEDS)
      list(JOIN FUZZ_SEEDS "," seeds)
      set(seeds "-seed_inputs=${seeds}")
    endif()
    add_test(NAME ${name}
             COMMAND ${name} -seed=1 -runs=${FUZZ_MUTATIONS} -max_len=65536 ${seeds})
  else()
    target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/fuzz/driver.c)
    target_link_libraries(${name} PRIVATE moe_test_support)
    add_test(NAME ${name} COMMAND ${name} -n ${FUZZ_MUTATIONS} ${FUZZ_SEEDS})
    add_test(NAME nightly_${name} COMMAND ${name} -n ${FUZZ_MUTATIONS}00 ${FUZZ_SEEDS})
    set_tests_properties(nightly_${name} PROPERTIES TIMEOUT 3600 LABELS nightly
      ENVIRONMENT MOE_SEED=101)
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${FUZZ_TIMEOUT} LABELS fuzz)
endfunction()
