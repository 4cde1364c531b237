# SPDX-License-Identifier: Apache-2.0
# The Python package against fake and training workers, the installed libmoeclient, and
# moectl's command line.
moe_integration_test(python)
moe_integration_test(libmoeclient)
moe_integration_test(install SLOW)
moe_integration_test(systemd)
moe_integration_test(moectl SLOW TIMEOUT 300)
moe_integration_test(python_training SLOW)
moe_integration_test(resumed_training SLOW TIMEOUT 300)
moe_integration_test(torch_compile TIMEOUT 300)
moe_integration_test(aux_loss)
set_tests_properties(integration_resumed_training integration_torch_compile PROPERTIES
  SKIP_REGULAR_EXPRESSION "OK .skipped=")
