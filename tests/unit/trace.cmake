# SPDX-License-Identifier: Apache-2.0
moe_test(test_trace SOURCES test_trace.c USES moe_trace moe_rpc moe_proto moe_daemon_base
  LABELS trace TIMEOUT 300)
