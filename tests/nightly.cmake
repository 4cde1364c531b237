# SPDX-License-Identifier: Apache-2.0
# The long matrices: the same programs as every day on other seeds, and more of them, and every
# compiler. Run once per change of what they cover (tests/run.sh --nightly), and recorded in
# tests/nightly.md.

# moe_nightly(NAME MINUTES COMMAND ...)
function(moe_nightly name minutes)
  cmake_parse_arguments(NIGHTLY "" "" "COMMAND" ${ARGN})
  math(EXPR seconds "60 * ${minutes}")
  add_test(NAME nightly_${name} COMMAND ${NIGHTLY_COMMAND} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(nightly_${name} PROPERTIES TIMEOUT ${seconds} LABELS nightly
    SKIP_RETURN_CODE 77)
endfunction()

# Seeds that no test of the day has.
foreach(slots 1 2 3 4)
  moe_nightly(conformance_cpu_${slots} 60 COMMAND
    conformance --backend cpu --slots ${slots} --cases 5000 --seed 10${slots})
  moe_nightly(conformance_training_cpu_${slots} 60 COMMAND
    conformance --backend cpu --slots ${slots} --cases 1000 --seed 10${slots} --training)
endforeach()
moe_nightly(conformance_cpu_skewed 60 COMMAND
  conformance --backend cpu --slots 4 --cases 1000 --seed 105 --skewed)
moe_nightly(conformance_training_cpu_skewed 60 COMMAND
  conformance --backend cpu --slots 4 --cases 200 --seed 105 --skewed --training)
moe_nightly(membership_sim 60 COMMAND
  ${CMAKE_COMMAND} -E env MOE_RUNS=200000 $<TARGET_FILE:test_membership_sim>)
moe_nightly(region_schedules 60 COMMAND ${CMAKE_COMMAND} -E env MOE_RUNS=10000 PYTHONUNBUFFERED=1
  ${MOE_PYTHON} -B ${PROJECT_SOURCE_DIR}/tests/integration/test_region_schedules.py
  ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR}/tests/golden/models)
moe_nightly(compilers 180 COMMAND ${PROJECT_SOURCE_DIR}/tests/compilers.sh)
set_tests_properties(nightly_compilers PROPERTIES RUN_SERIAL ON)
# Tests that need packages of PyPI; skipped without it.
moe_nightly(pypi 90 COMMAND ${PROJECT_SOURCE_DIR}/tests/pypi.sh ${PROJECT_BINARY_DIR})
set_tests_properties(nightly_pypi PROPERTIES RUN_SERIAL ON)
# The files of deploy/monitoring with a real group; skipped without Prometheus.
moe_nightly(monitoring_live 10 COMMAND ${MOE_PYTHON} -B
  ${PROJECT_SOURCE_DIR}/tests/monitoring/test_live.py
  ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR}/tests/golden/models)
set_tests_properties(nightly_monitoring_live PROPERTIES ENVIRONMENT "PYTHONUNBUFFERED=1")
# The units of deploy/systemd in a booted system; skipped without root or systemd-nspawn.
moe_nightly(boot 40 COMMAND ${MOE_PYTHON} -B ${PROJECT_SOURCE_DIR}/tests/boot/test_boot.py
  ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR}/tests/golden/models)
set_tests_properties(nightly_boot PROPERTIES RUN_SERIAL ON ENVIRONMENT "PYTHONUNBUFFERED=1")
# Debian packages and the image, in clean trees; skipped without root, debootstrap and so on.
foreach(suite bookworm trixie)
  moe_nightly(packages_${suite} 60 COMMAND ${MOE_PYTHON} -B
    ${PROJECT_SOURCE_DIR}/tests/packages/test_packages.py
    ${PROJECT_SOURCE_DIR}/tests/golden/models ${suite})
endforeach()
moe_nightly(packages_image 60 COMMAND ${MOE_PYTHON} -B
  ${PROJECT_SOURCE_DIR}/tests/packages/test_image.py ${PROJECT_BINARY_DIR}
  ${PROJECT_SOURCE_DIR}/tests/golden/models)
set_tests_properties(nightly_packages_bookworm nightly_packages_trixie nightly_packages_image
  PROPERTIES RUN_SERIAL ON ENVIRONMENT "PYTHONUNBUFFERED=1")
