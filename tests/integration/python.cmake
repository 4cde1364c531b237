# The Python package against a fake worker, the installed libmoeclient, and moectl's command line.
moe_integration_test(python)
moe_integration_test(libmoeclient)
moe_integration_test(moectl)
