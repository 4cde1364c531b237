# The Python package against a fake worker, and moectl's command line.
moe_integration_test(python)
moe_integration_test(moectl)
