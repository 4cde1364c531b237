# SPDX-License-Identifier: Apache-2.0
add_library(rpc_fixture STATIC rpc_fixture.c rpc_raw.c)
target_include_directories(rpc_fixture PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(rpc_fixture PUBLIC moe_rpc moe_proto moe_test_support PkgConfig::CMOCKA
  PRIVATE moe_strict)
foreach(name rpc_frame rpc_unpack rpc_calls rpc_reading rpc_unread rpc_services rpc_drain
  rpc_identity)
  moe_test(test_${name} SOURCES test_${name}.c USES rpc_fixture TIMEOUT 120 LABELS rpc)
endforeach()
moe_test(test_rpc_closing SOURCES test_rpc_closing.c USES rpc_fixture TIMEOUT 120 LABELS rpc)
target_link_options(test_rpc_closing PRIVATE
  -Wl,--wrap=grpc_server_request_call,--wrap=grpc_server_shutdown_and_notify
  -Wl,--wrap=grpc_server_destroy)
moe_test(test_rpc_tls SOURCES test_rpc_tls.c USES rpc_fixture moe_tls certificates
  TIMEOUT 120 LABELS rpc tls)
moe_test(test_rpc_budget SOURCES test_rpc_budget.c USES moe_uploads TIMEOUT 60 LABELS rpc)
moe_test(test_rpc_places SOURCES test_rpc_places.c USES moe_uploads TIMEOUT 60 LABELS rpc)
moe_test(test_frames SOURCES test_frames.c USES moe_listener LABELS rpc)
add_library(listener_fixture STATIC listener_fixture.c)
target_include_directories(listener_fixture PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(listener_fixture PUBLIC moe_listener moe_test_support PkgConfig::CMOCKA
  PRIVATE moe_strict)
moe_test(test_listener SOURCES test_listener.c USES listener_fixture moe_tls certificates
  LABELS rpc)
moe_test(test_park SOURCES test_park.c USES moe_listener LABELS rpc)
moe_test(test_parked SOURCES test_parked.c USES listener_fixture moe_tls certificates LABELS rpc)
