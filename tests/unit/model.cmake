# SPDX-License-Identifier: Apache-2.0
# Reader of model directories: the file format, the configuration, the loader.
foreach(part safetensors config config_families loader model_open golden_models model_write digest
             quantised mixed_precision packed_models token_tables kimi_k3 nemotron)
  moe_test(test_${part}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${part}.c ${CMAKE_CURRENT_LIST_DIR}/model_fixture.c
    USES moe_model moe_quant moe_oracle
    LABELS model)
  target_compile_definitions(test_${part} PRIVATE
    MOE_GOLDEN_DIR="${PROJECT_SOURCE_DIR}/tests/golden/models"
    MOE_QUANTISED_DIR="${PROJECT_SOURCE_DIR}/tests/golden/quantised"
    MOE_NUMPY_DIR="${PROJECT_SOURCE_DIR}/tests/golden/numpy"
    MOE_UNCOMMON_DIR="${PROJECT_SOURCE_DIR}/tests/golden/uncommon")
endforeach()
foreach(part loader model_open digest quantised mixed_precision kimi_k3 nemotron)
  target_sources(test_${part} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/small_model.c)
endforeach()
foreach(part config config_families kimi_k3 nemotron)
  target_sources(test_${part} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/config_fixture.c)
endforeach()
foreach(part quantised mixed_precision)
  target_sources(test_${part} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/checkpoint_copy.c)
  target_link_libraries(test_${part} PRIVATE PkgConfig::JANSSON)
endforeach()

add_test(NAME families_page COMMAND ${MOE_PYTHON} -B
  ${CMAKE_CURRENT_LIST_DIR}/families_page.py ${PROJECT_SOURCE_DIR})
set_tests_properties(families_page PROPERTIES LABELS model)

moe_test(test_quant SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_quant.c USES moe_quant m LABELS model)
