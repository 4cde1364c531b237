moe_test(test_sequencer SOURCES test_sequencer.c USES moe_worker_core)
