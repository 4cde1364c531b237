# The Python package against fake workers and training ones, the installed libmoeclient, and moectl's command line.
moe_integration_test(python)
moe_integration_test(libmoeclient)
moe_integration_test(moectl)
moe_integration_test(python_training)
moe_integration_test(resumed_training TIMEOUT 300)
set_tests_properties(integration_resumed_training PROPERTIES SKIP_REGULAR_EXPRESSION "OK .skipped=")
