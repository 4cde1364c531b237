# SPDX-License-Identifier: Apache-2.0
"""Tensors of callers: arguments of a forward pass, checked, as arrays that can be sent; and answers
in the caller's kind.

numpy arrays in, numpy arrays out. Torch tensors in, torch tensors out, on the device of the input:
others than the CPU's go through the host. Any other object with __dlpack__ in, numpy arrays out; it
must be in the host's memory.
"""

import sys

import numpy as np

from . import _errors, _wire
from ._dtypes import to_wire

_HOST_DEVICES = (1, 3)  # of DLPack: CPU; memory of the host that is pinned for CUDA
_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI", 10: "ROCm", 11: "ROCm host",
            13: "CUDA managed", 14: "oneAPI"}


def is_torch(value):
    """Whether this is a torch.Tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def bits_of_torch(tensor):
    """The memory of a contiguous CPU tensor as a numpy array; bfloat16 as uint16."""
    torch = sys.modules["torch"]
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def torch_of_bits(array, dtype):
    """A torch tensor of `dtype` with the memory of an array, as of bits_of_torch."""
    torch = sys.modules["torch"]
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_torch(tensor, name):
    torch = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError("%s requires a gradient, and this call has none: use moed.torch.RemoteMoE, "
                        "torch.no_grad() or %s.detach()" % (name, name))
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise TypeError("%s is no dense tensor with data" % name)
    return bits_of_torch(tensor.cpu().contiguous())


def _from_dlpack(value, name):
    kind, number = (int(part) for part in value.__dlpack_device__())
    if kind not in _HOST_DEVICES:
        raise TypeError("%s is on the device %s %d: copy it to the host first" % (
            name, _DEVICES.get(kind, "%d of DLPack" % kind), number))
    if hasattr(value, "__array__"):
        return np.asarray(value)
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError("%s: numpy reads no such tensor through DLPack (%s); bfloat16 goes as "
                        "uint16 with the bits" % (name, error)) from None


def as_array(value, name):
    """A numpy array of any tensor that this module knows, without a copy if possible."""
    if type(value) is np.ndarray:
        return value
    if is_torch(value):
        return _from_torch(value, name)
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack_device__"):
        return _from_dlpack(value, name)
    return np.asarray(value)


class Batch:
    """Checked arguments of a forward pass.

    layer    Layer
    x        [T,H] as it is sent: contiguous
    dtype    types_pb2.DataType of x
    ids      [T,K] int32, contiguous, or None
    weights  [T,K] float32, contiguous, or None
    token_ids
             [T] int64, contiguous, or None
    parts    index in _wire.PARTS
    return_rehomed
             the answer is to tell the layer's re-homed experts
    """

    __slots__ = ("layer", "x", "dtype", "ids", "weights", "token_ids", "parts", "return_rehomed",
                 "_half", "_torch", "_device")

    def __init__(self, layer, x, ids, weights, return_routing, parts, token_ids, return_rehomed,
                 limit, convert_half):
        self.layer, self.return_rehomed = layer, bool(return_rehomed)
        _wire.check_sources(layer, ids, token_ids)
        self.parts = _wire.parts_number(
            parts, ids is not None or token_ids is not None or return_routing)
        self._torch = self._device = None
        if type(x) is not np.ndarray and is_torch(x):
            self._torch, self._device = x.dtype, x.device
        x = as_array(x, "x")
        if x.ndim != 2 or x.shape[0] == 0 or x.shape[1] != layer.hidden:
            raise ValueError("x has shape %s, expected [T, %d] with T >= 1"
                             % (x.shape, layer.hidden))
        if 0 < limit < x.shape[0]:
            raise _errors.too_many_tokens(x.shape[0], limit)
        if weights is not None and ids is None:
            raise ValueError("topk_weights needs topk_ids")
        self._half = x.dtype == np.float16
        if self._half:
            if not convert_half:
                raise TypeError("x is float16, which the workers do not have: convert it, or use "
                                "moed.Client(float16=\"convert\")")
            x = x.astype(np.float32)
        self.dtype, self.x = to_wire(x)
        shape = (x.shape[0], layer.top_k)
        self.ids = None if ids is None else _wire.checked_ids(as_array(ids, "topk_ids"), shape)
        self.weights = None if weights is None else _wire.checked_weights(
            as_array(weights, "topk_weights"), shape)
        self.token_ids = None if token_ids is None else _wire.checked_token_ids(
            as_array(token_ids, "token_ids"), x.shape[0], layer)

    def give(self, y):
        """y [T,H], an array with the dtype of `x`, in the caller's kind and dtype."""
        if self._half:
            with np.errstate(over="ignore"):  # too large for float16: infinite
                y = y.astype(np.float16)
        return y if self._torch is None else torch_of_bits(y, self._torch).to(self._device)

    def give_routing(self, array):
        """topk_ids or topk_weights in the caller's kind."""
        return array if self._torch is None else sys.modules["torch"].from_numpy(array).to(
            self._device)
