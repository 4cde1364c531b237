foreach(part base options endpoint metrics crew daemon memory)
  moe_test(test_${part} SOURCES test_${part}.c USES moe_base LABELS base)
endforeach()
