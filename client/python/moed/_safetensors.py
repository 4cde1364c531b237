# SPDX-License-Identifier: Apache-2.0
"""Tensor files in the safetensors format: a length, a JSON header, raw little-endian data."""

import json
import math
import os
import struct

import numpy as np

from ._dtypes import BFLOAT16

HEADER_MAX = 100_000_000  # bytes; the format's own limit

BF16 = np.dtype(np.uint16) if BFLOAT16 is None else BFLOAT16
DTYPES = {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16), "I32": np.dtype(np.int32), "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16), "BF16": BF16, "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, np.dtype(np.uint16): "BF16"}


def read_safetensors(path):
    """Reads all tensors of a safetensors file into a dict of numpy arrays by name.

    BF16 tensors become ml_dtypes.bfloat16, or without that package uint16 with the bits (`moed.f32`
    widens both). Raises ValueError if the file is damaged or has a dtype that numpy lacks.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, data = _read_header(file, path, size)
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                dtype, shape = DTYPES.get(entry["dtype"]), entry["shape"]
                begin, end = _sizes(entry["data_offsets"])
                count = math.prod(_sizes(shape))
            except (KeyError, TypeError, ValueError):
                raise ValueError("%s: the entry of %r is malformed" % (path, name)) from None
            if dtype is None:
                raise ValueError("%s: numpy has no dtype for the %s of %r" % (
                    path, entry["dtype"], name))
            if end != begin + count * dtype.itemsize or data + end > size:
                raise ValueError("%s: %r does not fit its place in the file" % (path, name))
            file.seek(data + begin)
            tensors[name] = np.fromfile(file, dtype, count).reshape(shape)
    return tensors


def write_safetensors(path, tensors):
    """Writes a dict of numpy arrays as a safetensors file. Interprets uint16 arrays as BF16
    bits."""
    header, blobs, at = {}, [], 0
    # Wide elements first, so that each tensor is aligned to the size of its elements.
    for name, array in sorted(tensors.items(), key=lambda item: -np.asarray(item[1]).itemsize):
        array = np.asarray(array)
        if array.dtype not in NAMES:
            raise TypeError("safetensors has no name for the dtype %s of %r" % (array.dtype, name))
        blobs.append(array.tobytes())
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape),
                        "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(blobs)


def _read_header(file, path, size):
    """(header, offset of the data)"""
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_MAX + 1
    if length > min(HEADER_MAX, size - 8):
        raise ValueError("%s is not a safetensors file" % path)
    try:
        header = json.loads(file.read(length))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError("%s: the header is not a JSON object" % path)
    return header, 8 + length


def _sizes(numbers):
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError("not a list of sizes")
    return numbers
