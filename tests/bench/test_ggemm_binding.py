#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the Python side of the grouped products against the C side, without torch and a GPU.

    test_ggemm_binding.py LIBRARY_THAT_TELLS REPOSITORY

The library has the real entry functions on products that only tell what they were asked.
"""
import ast
import ctypes
import pathlib
import sys
import unittest

from ggemm_binding import Products, Refused, parse

HERE = pathlib.Path(__file__).resolve().parent


def some_values(entry, flags):
    """A different value for each argument; every bool is `flags`."""
    kinds = {
        "bool": lambda i: flags,
        "float": lambda i: i + 0.5,
        "pointer": lambda i: (i + 1) << 33,
        "int": lambda i: i % 2 + 1
    }
    return {name: kinds.get(kind, lambda i: 1000 + i)(i)
            for i, (kind, name) in enumerate(entry.arguments)}


class Binding(unittest.TestCase):
    def setUp(self):
        self.products = Products(LIBRARY)
        self.products.library.moe_recorded.restype = ctypes.c_char_p

    def recorded(self):
        pairs = (word.split("=") for word in self.products.library.moe_recorded().decode().split())
        return {name: float(value) for name, value in pairs}

    def test_every_argument_arrives_in_its_field(self):
        for name in ("ggemm", "cublas", "wgrad", "quantise", "packed_place", "packed_scale",
                     "packed_zeros"):
            for flags in (False, True):
                values = some_values(self.products.entries[name], flags)
                getattr(self.products, name)(**values)
                self.assertEqual(self.recorded(), {n: float(v) for n, v in values.items()}, name)

    def test_a_description_is_as_long_as_the_library_says(self):
        room = ctypes.create_string_buffer(self.products.constant("WEIGHTS_BYTES") + 8)
        self.products.describe(data=1 << 40, experts=3, rows=5, columns=7,
                               out=ctypes.addressof(room))
        self.assertEqual(self.recorded(), {"data": 1 << 40, "experts": 3, "rows": 5, "columns": 7})
        self.assertEqual(room.raw, b"\x5a" * self.products.constant("WEIGHTS_BYTES") + bytes(8))

    def test_numbers_come_back(self):
        self.assertEqual(self.products.cublas_bytes(gated=False, out_dtype=1, row_capacity=2, n=3),
                         1002003)
        self.assertEqual(len(self.products.tiles), 6)
        for processors, name in ((0, "decode"), (64, "decode_64")):
            tile = self.products.choose_tile(bucket=1, slots=1, top_k=1, experts=64, n=64, k=64,
                                             processors=processors)
            self.assertEqual(self.products.tiles[tile], name)

    def test_an_error_is_raised_with_its_text(self):
        values = some_values(self.products.entries["ggemm"], False) | {"experts": 0}
        with self.assertRaisesRegex(Refused, "no experts"):
            self.products.ggemm(**values)

    def test_an_argument_too_few_or_too_many_is_refused(self):
        values = some_values(self.products.entries["ggemm"], False)
        with self.assertRaisesRegex(TypeError, "unknown.*colour"):
            self.products.ggemm(colour=1, **values)
        del values["pre"]
        with self.assertRaisesRegex(TypeError, "missing.*pre"):
            self.products.ggemm(**values)

    def test_calls_of_the_benchmark_name_what_the_library_takes(self):
        names = {name: {n for _, n in arguments} for name, (_, arguments) in
                 parse(self.products.library.moe_entry_signatures().decode()).items()}
        tree = ast.parse("".join((HERE / f"{file}.py").read_text() for file in
                                 ("ggemm_vs_torch", "packed_vs_bf16", "w8a8_vs_torch")))
        plain = next(d for f in ast.walk(tree) if getattr(f, "name", "") == "plain"
                     for d in ast.walk(f) if isinstance(d, ast.Dict))
        self.assertEqual({k.value for k in plain.keys}, names["ggemm"])
        self.assertEqual(names["cublas"] - names["ggemm"], {"scratch"})
        seen = set()
        given_as = {}  # arguments of `**name`
        for d in ast.walk(tree):
            if isinstance(d, ast.Assign) and isinstance(d.value, ast.Dict):
                for t in d.targets:
                    given_as[getattr(t, "attr", getattr(t, "id", ""))] = {
                        getattr(k, "value", k) for k in d.value.keys}
        for call in ast.walk(tree):
            name = getattr(getattr(call, "func", None), "attr", "")
            if name not in names or getattr(call.func.value, "attr", "") != "lib":
                continue
            seen.add(name)
            given = {k.arg for k in call.keywords}
            if name in ("ggemm", "cublas"):
                self.assertEqual(given, {None})  # from `plain`
            elif name != "constant":
                given.discard(None)
                for k in call.keywords:
                    if k.arg is None:
                        given |= given_as[getattr(k.value, "attr", getattr(k.value, "id", ""))]
                self.assertEqual(given, names[name], f"line {call.lineno}: {name}")
        self.assertEqual(seen, set(names) - {"tile_name"})
        changed = {k.arg for call in ast.walk(tree) if isinstance(call, ast.Call)
                   and getattr(call.func, "attr", "") == "plain" for k in call.keywords}
        self.assertLessEqual(changed, names["cublas"])


class NoMirrors(unittest.TestCase):
    def test_no_python_file_mirrors_a_struct_of_c(self):
        found = []
        for path in pathlib.Path(ROOT).rglob("*.py"):
            if "build" in path.relative_to(ROOT).parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(node, "attr", getattr(node, "id", ""))
                if name in ("Structure", "BigEndianStructure", "LittleEndianStructure",
                            "Union") and \
                        path.name != pathlib.Path(__file__).name:
                    found.append(f"{path}:{node.lineno}")
        self.assertEqual(found, [])


if __name__ == "__main__":
    LIBRARY, ROOT = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1])
