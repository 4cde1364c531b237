# SPDX-License-Identifier: Apache-2.0
# FROM, a module made by protoc, to TO, with imports of its siblings made relative.
file(READ ${FROM} text)
string(REGEX REPLACE "\nfrom [a-z0-9_.]+ import ([a-z0-9_]+_pb2) as"
  "\nfrom . import \\1 as" text "${text}")
file(WRITE ${TO} "${text}")
