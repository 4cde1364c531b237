# SPDX-License-Identifier: Apache-2.0
# Copies FROM, a module made by protoc, to TO and makes imports of its siblings relative.
file(READ ${FROM} text)
string(REGEX REPLACE "\nfrom [a-z0-9_.]+ import ([a-z0-9_]+_pb2) as"
  "\nfrom . import \\1 as" text "${text}")
file(WRITE ${TO} "${text}")
