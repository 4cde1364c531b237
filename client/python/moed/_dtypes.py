# SPDX-License-Identifier: Apache-2.0
"""Number formats: conversion between numpy arrays and the protocol's DataType."""

import numpy as np

from ._proto import types_pb2

try:
    import ml_dtypes

    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
except ImportError:
    BFLOAT16 = None


def bf16(array):
    """`array` as BF16.

    Rounds floats to nearest even; NaN stays NaN. Interprets a uint16 array as bits of BF16 numbers.
    Returns an array of ml_dtypes.bfloat16, or of uint16 without that package.
    """
    array = np.asarray(array)
    if array.dtype == np.uint16:
        bits = array
    elif BFLOAT16 is not None and array.dtype == BFLOAT16:
        return array
    else:
        wide = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = (wide + (0x7FFF + ((wide >> 16) & 1)).astype(np.uint32)) >> 16
        is_nan = (wide & 0x7FFFFFFF) > 0x7F800000
        bits = np.where(is_nan, 0x7FFF, rounded).astype(np.uint16)
    return bits if BFLOAT16 is None else bits.view(BFLOAT16)


def f32(array):
    """`array` as float32. Interprets a uint16 array as bits of BF16 numbers."""
    array = np.asarray(array)
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, np.float32)


def to_wire(array, name="x"):
    """(DataType, contiguous array) of a tensor to send."""
    if array.dtype == np.float32:
        return types_pb2.DATA_TYPE_F32, np.ascontiguousarray(array)
    if array.dtype == np.uint16 or (BFLOAT16 is not None and array.dtype == BFLOAT16):
        return types_pb2.DATA_TYPE_BF16, np.ascontiguousarray(array)
    raise TypeError(
        "%s must be float32 or bfloat16 (or uint16 with the bits of bfloat16), not %s; "
        "see moed.bf16" % (name, array.dtype))


ID_DTYPES = {
    types_pb2.DATA_TYPE_U8: np.uint8,
    types_pb2.DATA_TYPE_U16: np.uint16,
    types_pb2.DATA_TYPE_I32: np.int32,
}
