# SPDX-License-Identifier: Apache-2.0
# Reader of model directories: the file format, the configuration, the loader.
foreach(part safetensors config config_families loader model_open golden_models model_write digest)
  moe_test(test_${part}
    SOURCES ${CMAKE_CURRENT_LIST_DIR}/test_${part}.c ${CMAKE_CURRENT_LIST_DIR}/model_fixture.c
    USES moe_model moe_oracle
    LABELS model)
  target_compile_definitions(test_${part} PRIVATE
    MOE_GOLDEN_DIR="${PROJECT_SOURCE_DIR}/tests/golden/models")
endforeach()
foreach(part loader model_open digest)
  target_sources(test_${part} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/small_model.c)
endforeach()
foreach(part config config_families)
  target_sources(test_${part} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/config_fixture.c)
endforeach()
