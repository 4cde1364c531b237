# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of Forward: conversion between numpy arrays and messages."""

import numpy as np

from ._dtypes import ID_DTYPES, to_wire
from ._proto import types_pb2


def ids_to_wire(ids, shape):
    ids = np.asarray(ids)
    if ids.shape != shape:
        raise ValueError("topk_ids has shape %s, expected %s" % (ids.shape, shape))
    if ids.dtype.kind not in "iu":
        raise TypeError("topk_ids must be integers, not %s" % ids.dtype)
    if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ValueError("topk_ids does not fit 32 bits")
    return np.ascontiguousarray(ids, np.int32).tobytes()


def weights_to_wire(weights, shape):
    weights = np.asarray(weights)
    if weights.shape != shape:
        raise ValueError("topk_weights has shape %s, expected %s" % (weights.shape, shape))
    return np.ascontiguousarray(weights, np.float32).tobytes()


def fill_request(request, layer, x, topk_ids, topk_weights, return_routing):
    """Fills a ForwardRequest or ForwardStreamRequest; `layer` is a Layer."""
    x = np.asarray(x)
    if x.ndim != 2 or x.shape[0] == 0 or x.shape[1] != layer.hidden:
        raise ValueError("x has shape %s, expected [T, %d] with T >= 1" % (x.shape, layer.hidden))
    if topk_weights is not None and topk_ids is None:
        raise ValueError("topk_weights needs topk_ids")
    request.dtype, x = to_wire(x)
    request.layer = layer.layer
    request.tokens, request.hidden = x.shape
    request.return_routing = return_routing
    request.routing_mode = types_pb2.ROUTING_MODE_SERVER
    shape = (x.shape[0], layer.top_k)
    if topk_ids is not None:
        request.routing_mode = types_pb2.ROUTING_MODE_CLIENT_IDS
        request.topk_ids_dtype = types_pb2.DATA_TYPE_I32
        request.topk_ids = ids_to_wire(topk_ids, shape)
    if topk_weights is not None:
        request.routing_mode = types_pb2.ROUTING_MODE_CLIENT_IDS_AND_WEIGHTS
        request.topk_weights = weights_to_wire(topk_weights, shape)
    request.x_data = x.tobytes()
    return x


def array(data, dtype, shape, name):
    if len(data) != np.dtype(dtype).itemsize * shape[0] * shape[1]:
        raise ValueError("broken answer from the server: %s has %d bytes" % (name, len(data)))
    return np.frombuffer(data, dtype).reshape(shape).copy()


def read_y(answer, x):
    """y [T,H] with the dtype of x, in separate writable memory."""
    if (answer.tokens, answer.hidden) != x.shape:
        raise ValueError("broken answer from the server: y has another shape than x")
    return array(answer.y_data, x.dtype, x.shape, "y")


def read_routing(answer, x):
    """(topk_ids int32 [T,K], topk_weights float32 [T,K])."""
    shape = (x.shape[0], answer.top_k)
    dtype = ID_DTYPES.get(answer.topk_ids_dtype)
    if dtype is None:
        raise ValueError("broken answer from the server: topk_ids of an unknown dtype")
    ids = array(answer.topk_ids, dtype, shape, "topk_ids").astype(np.int32, copy=False)
    return ids, array(answer.topk_weights, np.float32, shape, "topk_weights")


def stages(answer):
    """dict of an answer's StageTimes."""
    return {field.name: getattr(answer.stages, field.name)
            for field in answer.stages.DESCRIPTOR.fields}
