# The distribution's interpreter: it has python3-protobuf through deploy/packages.txt.
add_test(NAME proto_lint COMMAND /usr/bin/python3 -B ${CMAKE_CURRENT_SOURCE_DIR}/proto_lint.py
                                 ${MOE_DESCRIPTOR_SET})
set_tests_properties(proto_lint PROPERTIES TIMEOUT 60)
