moe_test(test_sequencer SOURCES test_sequencer.c USES moe_worker_core)
moe_test(test_peers SOURCES test_peers.c USES moe_worker_core)
moe_test(test_group SOURCES test_group.c USES moe_worker_core)
