# SPDX-License-Identifier: Apache-2.0
"""The grouped products of kernels/cuda for Python, by plain arguments (ggemm_entry.h).

The library describes its functions and their arguments; nothing is repeated here. Calls name every
argument, so an argument that only one side knows is an error before the call.
"""
import ctypes

C_TYPES = {"int": ctypes.c_int, "bool": ctypes.c_bool, "float": ctypes.c_float,
           "uint32_t": ctypes.c_uint32, "size_t": ctypes.c_size_t, "pointer": ctypes.c_void_p,
           "text": ctypes.c_char_p}


class Refused(Exception):
    """A product returned an error."""


class Entry:
    """One function of the library."""

    def __init__(self, function, result, arguments):
        self.function, self.result, self.arguments = function, result, arguments
        function.restype = C_TYPES[result]
        function.argtypes = [C_TYPES[kind] for kind, _ in arguments]

    def names(self):
        return [name for _, name in self.arguments]

    def __call__(self, **values):
        names = self.names()
        if set(values) != set(names):
            raise TypeError(f"missing {sorted(set(names) - set(values))}, "
                            f"unknown {sorted(set(values) - set(names))}")
        return self.function(*[values[name] for name in names])


def parse(signatures):
    """{name: (result, [(type, name), ...])} from the text of moe_entry_signatures."""
    entries = {}
    for line in signatures.splitlines():
        result, name, arguments = line.split(" ", 2)
        entries[name] = (result, [tuple(a.split()) for a in arguments.split(", ")])
    return entries


class Products:
    """The library's functions by name. The RAISING ones return an error text and raise Refused."""
    RAISING = ("ggemm", "cublas", "wgrad", "describe", "quantise", "packed_place",
               "packed_scale", "packed_zeros")

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.moe_entry_signatures.restype = ctypes.c_char_p
        self.entries = {}
        for name, (result, arguments) in parse(
                self.library.moe_entry_signatures().decode()).items():
            function = getattr(self.library, f"moe_entry_{name}")
            self.entries[name] = Entry(function, result, arguments)
        self.tiles = []
        while (name := self.entries["tile_name"](tile=len(self.tiles))) is not None:
            self.tiles.append(name.decode())

    def constant(self, name):
        value = self.entries["constant"](name=name.encode())
        if value < 0:
            raise KeyError(name)
        return value

    def __getattr__(self, name):
        if name not in self.entries:
            raise AttributeError(name)
        entry = self.entries[name]
        if name not in self.RAISING:
            return entry

        def call(**values):
            error = entry(**values)
            if error is not None:
                raise Refused(error.decode())
        return call
