moe_test(test_base SOURCES test_base.c USES moe_base)
moe_test(test_options SOURCES test_options.c USES moe_base)
moe_test(test_metrics SOURCES test_metrics.c USES moe_base)
moe_test(test_daemon SOURCES test_daemon.c USES moe_base)
