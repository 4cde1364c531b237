# SPDX-License-Identifier: Apache-2.0
# Every test has the label of its room or kind, and one of three that say when it runs:
#   quick     seconds; after every edit:    ctest --preset quick
#   all       before every merge, with the quick ones:    tests/run.sh
#   nightly   minutes to hours; once per change of what it covers:    tests/run.sh --nightly
# A test asks for `slow` or `nightly` in its LABELS; every other test is quick. Those that the
# preset tsan runs have the label `tsan` besides: all unit tests, and what asks for it.

# moe_label_tests(): the last line of each folder of tests.
function(moe_label_tests)
  get_property(tests DIRECTORY PROPERTY TESTS)
  foreach(test IN LISTS tests)
    get_test_property(${test} LABELS labels)
    if(labels STREQUAL "NOTFOUND")
      set(labels "")
    endif()
    if(NOT "nightly" IN_LIST labels)
      list(APPEND labels all)
      if(NOT "slow" IN_LIST labels)
        list(APPEND labels quick)
      endif()
    endif()
    if(CMAKE_CURRENT_SOURCE_DIR STREQUAL ${PROJECT_SOURCE_DIR}/tests/unit)
      list(APPEND labels tsan)
    endif()
    set_tests_properties(${test} PROPERTIES LABELS "${labels}")
  endforeach()
endfunction()
