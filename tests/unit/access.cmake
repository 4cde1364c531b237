# SPDX-License-Identifier: Apache-2.0
moe_test(test_access SOURCES test_access.c USES moe_access moe_daemon_base LABELS access)
# Each RPC of each service has an entry, and each entry an RPC.
moe_test(access_policy SOURCES test_access_policy.c USES moe_access moe_rpc moe_proto
  LABELS access)
moe_test(test_expiry SOURCES test_expiry.c USES moe_access moe_tls moe_daemon_base certificates
  LABELS access)
