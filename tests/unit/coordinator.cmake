moe_test(test_membership_sim SOURCES test_membership_sim.c USES moe_coordinator TIMEOUT 240)
