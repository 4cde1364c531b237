# SPDX-License-Identifier: Apache-2.0
add_library(certificates STATIC certificates.c)
target_include_directories(certificates PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(certificates
  PUBLIC moe_test_support PkgConfig::CMOCKA PkgConfig::SSL PkgConfig::CRYPTO PRIVATE moe_strict)
moe_test(test_tls_pem SOURCES test_tls_pem.c USES moe_tls certificates LABELS tls)
moe_test(test_tls SOURCES test_tls.c USES moe_tls certificates LABELS tls)
