# SPDX-License-Identifier: Apache-2.0
"""Buf's STANDARD and COMMENTS lint rules, and our own subset of proto3, over the descriptor set of
package moe.v1. First every rule is shown a file that breaks it and must say so.

    proto_lint.py DESCRIPTORS.pb

Rule names are Buf's (https://buf.build/docs/lint/rules); those that start with SUBSET are ours:
what protobuf-c 1.4 compiles, and what the tensor framing relies on."""

import re
import sys

from google.protobuf import descriptor_pb2 as pb

PACKAGE = "moe.v1"
TENSOR_FIELDS = range(12, 16)  # `bytes` fields that are framed by hand

# Numbers of the lists inside a file, as they occur in paths of SourceCodeInfo.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
SERVICE_RPC = 2


def is_pascal(name):
    return re.fullmatch(r"[A-Z][A-Za-z0-9]*", name)


def is_lower_snake(name):
    return re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)


def is_upper_snake(name):
    return re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", name)


def upper_snake(pascal):
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", pascal).upper()


class Linter:
    def __init__(self):
        self.found = []  # (rule, where)
        self.uses = {}  # request or response type -> how many rpcs use it

    def check(self, ok, rule, where):
        if not ok:
            self.found.append((rule, where))

    def lint(self, files):
        directories = {f.name.rpartition("/")[0] for f in files}
        self.check(len(directories) <= 1, "PACKAGE_SAME_DIRECTORY", PACKAGE)
        for f in files:
            self.file(f)
        for name, count in self.uses.items():
            self.check(count == 1, "RPC_REQUEST_RESPONSE_UNIQUE", name)
        self.recursion(files)

    def file(self, f):
        self.comments = {
            tuple(l.path) for l in f.source_code_info.location if l.leading_comments.strip()
        }
        directory, _, base = f.name.rpartition("/")
        self.check(f.syntax == "proto3", "SYNTAX_SPECIFIED", f.name)
        self.check(f.package, "PACKAGE_DEFINED", f.name)
        versioned = re.search(r"\.v[1-9]\d*((alpha|beta)\d*)?$", f.package)
        snakes = all(is_lower_snake(p) for p in f.package.split("."))
        self.check(versioned, "PACKAGE_VERSION_SUFFIX", f.name)
        self.check(snakes, "PACKAGE_LOWER_SNAKE_CASE", f.name)
        self.check(directory == f.package.replace(".", "/"), "PACKAGE_DIRECTORY_MATCH", f.name)
        self.check(is_lower_snake(base.removesuffix(".proto")), "FILE_LOWER_SNAKE_CASE", f.name)
        self.check(not f.public_dependency, "IMPORT_NO_PUBLIC", f.name)
        self.check(not f.weak_dependency, "IMPORT_NO_WEAK", f.name)
        self.check(not f.extension, "SUBSET_NO_EXTENSIONS", f.name)
        for i, m in enumerate(f.message_type):
            self.message(m, f.package, (FILE_MESSAGE, i))
        for i, e in enumerate(f.enum_type):
            self.enum(e, f.package, (FILE_ENUM, i))
        for i, s in enumerate(f.service):
            self.service(s, f.package, (FILE_SERVICE, i))

    def message(self, m, scope, path):
        full = f"{scope}.{m.name}"
        self.check(is_pascal(m.name), "MESSAGE_PASCAL_CASE", full)
        self.check(not m.options.map_entry, "SUBSET_NO_MAPS", full)
        self.check(path in self.comments or m.options.map_entry, "COMMENT_MESSAGE", full)
        repeated = {f.name for f in m.field if f.label == f.LABEL_REPEATED}
        for i, f in enumerate(m.field):
            where = f"{full}.{f.name}"
            self.check(is_lower_snake(f.name), "FIELD_LOWER_SNAKE_CASE", where)
            self.check(path + (MESSAGE_FIELD, i) in self.comments, "COMMENT_FIELD", where)
            self.check(not f.proto3_optional, "SUBSET_NO_OPTIONAL", where)
            self.check(f.type != f.TYPE_GROUP, "SUBSET_NO_GROUPS", where)
            clashes = f.name == "base" or (f.name.startswith("n_") and f.name[2:] in repeated)
            self.check(not clashes, "SUBSET_FIELD_NAME", where)
            tensor = f.number in TENSOR_FIELDS and f.type == f.TYPE_BYTES
            self.check(not (tensor and f.label == f.LABEL_REPEATED), "SUBSET_TENSOR_ONCE", where)
        for i, o in enumerate(m.oneof_decl):
            where = f"{full}.{o.name}"
            if not o.name.startswith("_"):  # those of `optional` are synthetic
                self.check(is_lower_snake(o.name), "ONEOF_LOWER_SNAKE_CASE", where)
                self.check(path + (MESSAGE_ONEOF, i) in self.comments, "COMMENT_ONEOF", where)
        for i, n in enumerate(m.nested_type):
            self.message(n, full, path + (MESSAGE_NESTED, i))
        for i, e in enumerate(m.enum_type):
            self.enum(e, full, path + (MESSAGE_ENUM, i))

    def enum(self, e, scope, path):
        full = f"{scope}.{e.name}"
        self.check(is_pascal(e.name), "ENUM_PASCAL_CASE", full)
        self.check(path in self.comments, "COMMENT_ENUM", full)
        self.check(not e.options.allow_alias, "ENUM_NO_ALLOW_ALIAS", full)
        self.check(e.value[0].number == 0, "ENUM_FIRST_VALUE_ZERO", full)
        for v in e.value:
            where = f"{full}.{v.name}"
            self.check(is_upper_snake(v.name), "ENUM_VALUE_UPPER_SNAKE_CASE", where)
            self.check(v.name.startswith(upper_snake(e.name) + "_"), "ENUM_VALUE_PREFIX", where)
            if v.number == 0:
                self.check(v.name.endswith("_UNSPECIFIED"), "ENUM_ZERO_VALUE_SUFFIX", where)

    def service(self, s, scope, path):
        full = f"{scope}.{s.name}"
        self.check(is_pascal(s.name), "SERVICE_PASCAL_CASE", full)
        self.check(s.name.endswith("Service"), "SERVICE_SUFFIX", full)
        self.check(path in self.comments, "COMMENT_SERVICE", full)
        for i, r in enumerate(s.method):
            where = f"{full}.{r.name}"
            self.check(is_pascal(r.name), "RPC_PASCAL_CASE", where)
            self.check(path + (SERVICE_RPC, i) in self.comments, "COMMENT_RPC", where)
            for kind, used in (("Request", r.input_type), ("Response", r.output_type)):
                name = used.rpartition(".")[2]
                standard = {f"{r.name}{kind}", f"{s.name}{r.name}{kind}"}
                self.check(name in standard, f"RPC_{kind.upper()}_STANDARD_NAME", where)
                self.uses[used] = self.uses.get(used, 0) + 1

    def recursion(self, files):
        """protobuf-c unpacks nested messages on the stack, to any depth."""
        contains = {}

        def walk(m, full):
            contains[full] = [f.type_name for f in m.field if f.type == f.TYPE_MESSAGE]
            for n in m.nested_type:
                walk(n, f"{full}.{n.name}")

        for f in files:
            for m in f.message_type:
                walk(m, f".{f.package}.{m.name}")

        def reaches(start, name, seen):
            for inner in contains.get(name, ()):
                if inner == start or (inner not in seen and reaches(start, inner, seen | {inner})):
                    return True
            return False

        for name in contains:
            self.check(not reaches(name, name, {name}), "SUBSET_NO_RECURSION", name[1:])


def type_names(message):
    for f in message.field:
        yield f.type_name
    for n in message.nested_type:
        yield from type_names(n)


def check_imports(linter, files, every_file):
    """IMPORT_USED needs the imported files as well."""
    declares = {}
    for f in every_file:
        names = [m.name for m in f.message_type] + [e.name for e in f.enum_type]
        declares[f.name] = {f".{f.package}.{n}" for n in names}
    for f in files:
        used = {t for m in f.message_type for t in type_names(m)}
        used |= {t for s in f.service for r in s.method for t in (r.input_type, r.output_type)}
        for d in f.dependency:
            names = declares[d]
            ok = any(u == n or u.startswith(n + ".") for u in used for n in names)
            linter.check(ok, "IMPORT_USED", f"{f.name}: {d}")


def lint(descriptors):
    files = [f for f in descriptors.file if f.package == PACKAGE or f.name.startswith("moe/")]
    linter = Linter()
    linter.lint(files)
    check_imports(linter, files, descriptors.file)
    return files, linter.found


# ---------------------------------------------------------------- the rules find what they are for


def good_set():
    """A small file that keeps every rule."""
    s = pb.FileDescriptorSet()
    f = s.file.add(name="moe/v1/good.proto", package=PACKAGE, syntax="proto3")
    f.dependency.append("moe/v1/kinds.proto")
    for name in ("DoRequest", "DoResponse"):
        m = f.message_type.add(name=name)
        m.field.add(name="value", number=1, label=1, type=13)
    m.field.add(name="kind", number=2, label=1, type=14, type_name=".moe.v1.KindOfThing")
    m.field.add(name="tensor", number=15, label=1, type=12, oneof_index=0)
    m.oneof_decl.add(name="payload")
    service = f.service.add(name="GoodService")
    service.method.add(name="Do", input_type=".moe.v1.DoRequest", output_type=".moe.v1.DoResponse")
    comment(f, (4, 0), (4, 0, 2, 0), (4, 1), (4, 1, 2, 0), (4, 1, 2, 1), (4, 1, 2, 2), (4, 1, 8, 0))
    comment(f, (6, 0), (6, 0, 2, 0))
    k = s.file.add(name="moe/v1/kinds.proto", package=PACKAGE, syntax="proto3")
    e = k.enum_type.add(name="KindOfThing")
    e.value.add(name="KIND_OF_THING_UNSPECIFIED", number=0)
    e.value.add(name="KIND_OF_THING_A", number=1)
    comment(k, (5, 0))
    return s


def comment(f, *paths):
    for path in paths:
        f.source_code_info.location.add(path=path, leading_comments=" Said.\n")


def uncomment(f, path):
    for l in f.source_code_info.location:
        if tuple(l.path) == path:
            l.leading_comments = ""


def set_to(what, name, value):
    setattr(what, name, value)


# For each rule a change to the good set that breaks it: f = its file, e = its enum.
BREAKS = {
    "SYNTAX_SPECIFIED": lambda f, e: set_to(f, "syntax", ""),
    "PACKAGE_DEFINED": lambda f, e: set_to(f, "package", ""),
    "PACKAGE_VERSION_SUFFIX": lambda f, e: set_to(f, "package", "moe.first"),
    "PACKAGE_LOWER_SNAKE_CASE": lambda f, e: set_to(f, "package", "Moe.v1"),
    "PACKAGE_DIRECTORY_MATCH": lambda f, e: set_to(f, "name", "moe/v2/good.proto"),
    "PACKAGE_SAME_DIRECTORY": lambda f, e: set_to(f, "name", "moe/v2/good.proto"),
    "FILE_LOWER_SNAKE_CASE": lambda f, e: set_to(f, "name", "moe/v1/Good.proto"),
    "IMPORT_NO_PUBLIC": lambda f, e: f.public_dependency.append(0),
    "IMPORT_NO_WEAK": lambda f, e: f.weak_dependency.append(0),
    "IMPORT_USED": lambda f, e: f.message_type[1].field.remove(f.message_type[1].field[1]),
    "MESSAGE_PASCAL_CASE": lambda f, e: set_to(f.message_type[0], "name", "do_request"),
    "FIELD_LOWER_SNAKE_CASE": lambda f, e: set_to(f.message_type[0].field[0], "name", "Value"),
    "ONEOF_LOWER_SNAKE_CASE": lambda f, e: set_to(
        f.message_type[1].oneof_decl[0], "name", "payLoad"),
    "ENUM_PASCAL_CASE": lambda f, e: set_to(e, "name", "Kind_Of_Thing"),
    "ENUM_NO_ALLOW_ALIAS": lambda f, e: set_to(e.options, "allow_alias", True),
    "ENUM_FIRST_VALUE_ZERO": lambda f, e: set_to(e.value[0], "number", 2),
    "ENUM_VALUE_UPPER_SNAKE_CASE": lambda f, e: set_to(e.value[1], "name", "KIND_OF_THING_a"),
    "ENUM_VALUE_PREFIX": lambda f, e: set_to(e.value[1], "name", "A"),
    "ENUM_ZERO_VALUE_SUFFIX": lambda f, e: set_to(e.value[0], "name", "KIND_OF_THING_NONE"),
    "SERVICE_PASCAL_CASE": lambda f, e: set_to(f.service[0], "name", "goodService"),
    "SERVICE_SUFFIX": lambda f, e: set_to(f.service[0], "name", "Good"),
    "RPC_PASCAL_CASE": lambda f, e: set_to(f.service[0].method[0], "name", "do"),
    "RPC_REQUEST_STANDARD_NAME": lambda f, e: set_to(
        f.service[0].method[0], "input_type", ".moe.v1.DoResponse"),
    "RPC_RESPONSE_STANDARD_NAME": lambda f, e: set_to(
        f.service[0].method[0], "output_type", ".moe.v1.Done"),
    "RPC_REQUEST_RESPONSE_UNIQUE": lambda f, e: f.service[0].method.add(
        name="Redo", input_type=".moe.v1.DoRequest", output_type=".moe.v1.RedoResponse"),
    "COMMENT_MESSAGE": lambda f, e: uncomment(f, (4, 0)),
    "COMMENT_FIELD": lambda f, e: uncomment(f, (4, 1, 2, 0)),
    "COMMENT_ONEOF": lambda f, e: uncomment(f, (4, 1, 8, 0)),
    "COMMENT_SERVICE": lambda f, e: uncomment(f, (6, 0)),
    "COMMENT_RPC": lambda f, e: uncomment(f, (6, 0, 2, 0)),
    "COMMENT_ENUM": lambda f, e: f.enum_type.add(name="Bare").value.add(name="BARE_UNSPECIFIED"),
    "SUBSET_NO_EXTENSIONS": lambda f, e: f.extension.add(name="more", number=100),
    "SUBSET_NO_MAPS": lambda f, e: set_to(f.message_type[0].options, "map_entry", True),
    "SUBSET_NO_OPTIONAL": lambda f, e: set_to(f.message_type[0].field[0], "proto3_optional", True),
    "SUBSET_NO_GROUPS": lambda f, e: set_to(f.message_type[0].field[0], "type", 10),
    "SUBSET_FIELD_NAME": lambda f, e: set_to(f.message_type[0].field[0], "name", "base"),
    "SUBSET_TENSOR_ONCE": lambda f, e: set_to(f.message_type[1].field[2], "label", 3),
    "SUBSET_NO_RECURSION": lambda f, e: f.message_type[0].field.add(
        name="more", number=3, label=1, type=11, type_name=".moe.v1.DoRequest"),
}


def self_test():
    _, found = lint(good_set())
    assert not found, f"the good file is said to break {found}"
    for rule, damage in BREAKS.items():
        s = good_set()
        damage(s.file[0], s.file[1].enum_type[0])
        _, found = lint(s)
        assert rule in {r for r, _ in found}, f"{rule} does not see what breaks it: {found}"
    print(f"{len(BREAKS)} rules, each shown to find what it is for")


def main():
    self_test()
    descriptors = pb.FileDescriptorSet()
    with open(sys.argv[1], "rb") as f:
        descriptors.ParseFromString(f.read())
    files, found = lint(descriptors)
    assert len(files) >= 5, f"only {len(files)} files of {PACKAGE} in the descriptor set"
    for rule, where in found:
        print(f"{where}: {rule}")
    print(f"{len(files)} files of {PACKAGE}: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
