# SPDX-License-Identifier: Apache-2.0
"""Requests and answers of Forward: conversion between numpy arrays and messages."""

import grpc
import numpy as np

from ._answers import ForwardResult
from ._dtypes import ID_DTYPES
from ._errors import MoeError
from ._proto import types_pb2


def checked_ids(ids, shape):
    """topk_ids as contiguous int32."""
    ids = np.asarray(ids)
    if ids.shape != shape:
        raise ValueError("topk_ids has shape %s, expected %s" % (ids.shape, shape))
    if ids.dtype.kind not in "iu":
        raise TypeError("topk_ids must be integers, not %s" % ids.dtype)
    if ids.size and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ValueError("topk_ids does not fit 32 bits")
    return np.ascontiguousarray(ids, np.int32)


def checked_weights(weights, shape):
    """topk_weights as contiguous float32."""
    weights = np.asarray(weights)
    if weights.shape != shape:
        raise ValueError("topk_weights has shape %s, expected %s" % (weights.shape, shape))
    return np.ascontiguousarray(weights, np.float32)


def check_sources(layer, ids, token_ids):
    """Refuses token_ids that are not the only source of the routing, or not of this layer's."""
    if token_ids is None:
        return
    if ids is not None:
        raise ValueError("token_ids and topk_ids exclude each other")
    if not layer.vocabulary:
        raise MoeError(grpc.StatusCode.INVALID_ARGUMENT, "ROUTING_INVALID",
                       "layer %d does not route by token id: it takes no token_ids" % layer.layer)


def checked_token_ids(token_ids, tokens, layer):
    """token_ids as contiguous int64."""
    token_ids = np.asarray(token_ids)
    if token_ids.shape != (tokens,):
        raise ValueError("token_ids has shape %s, expected %s" % (token_ids.shape, (tokens,)))
    if token_ids.dtype.kind not in "iu":
        raise TypeError("token_ids must be integers, not %s" % token_ids.dtype)
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < layer.vocabulary:
        raise MoeError(grpc.StatusCode.INVALID_ARGUMENT, "VALUE_INVALID",
                       "a token id is not in 0 to %d" % (layer.vocabulary - 1))
    return np.ascontiguousarray(token_ids, np.int64)


# Of a Batch; the same numbers as enum moe_parts of libmoeclient.
PARTS = ("both", "routed", "shared")
_WIRE_PARTS = (types_pb2.LAYER_PARTS_UNSPECIFIED, types_pb2.LAYER_PARTS_ROUTED,
               types_pb2.LAYER_PARTS_SHARED)


_WIRE_POLICIES = {"wait": types_pb2.ON_UNAVAILABLE_UNSPECIFIED,
                  "fail": types_pb2.ON_UNAVAILABLE_FAIL,
                  "partial": types_pb2.ON_UNAVAILABLE_PARTIAL}


def policy_number(policy):
    """The OnUnavailable of Client.forward's on_unavailable."""
    if policy not in _WIRE_POLICIES:
        raise ValueError("on_unavailable is 'wait', 'fail' or 'partial', not %r" % (policy,))
    return _WIRE_POLICIES[policy]


def parts_number(parts, with_routing):
    """The index in PARTS. `with_routing`: ids are given or asked for."""
    if parts not in PARTS:
        raise ValueError("parts is 'both', 'routed' or 'shared', not %r" % (parts,))
    if parts == "shared" and with_routing:
        raise ValueError("parts: shared experts have no routing")
    return PARTS.index(parts)


def fill_request(request, batch, return_routing):
    """Fills a ForwardRequest or ForwardStreamRequest from a Batch."""
    request.parts = _WIRE_PARTS[batch.parts]
    request.dtype = batch.dtype
    request.layer = batch.layer.layer
    request.tokens, request.hidden = batch.x.shape
    request.return_routing = return_routing
    request.return_rehomed = batch.return_rehomed
    request.routing_mode = types_pb2.ROUTING_MODE_SERVER
    if batch.ids is not None:
        request.routing_mode = types_pb2.ROUTING_MODE_CLIENT_IDS
        request.topk_ids_dtype = types_pb2.DATA_TYPE_I32
        request.topk_ids = batch.ids.tobytes()
    if batch.weights is not None:
        request.routing_mode = types_pb2.ROUTING_MODE_CLIENT_IDS_AND_WEIGHTS
        request.topk_weights = batch.weights.tobytes()
    if batch.token_ids is not None:
        request.token_ids = batch.token_ids.tobytes()
    request.x_data = batch.x.tobytes()


def check_parts(answer, batch):
    """A worker that does not know parts computes both. Raises MoeError."""
    if batch.parts and answer.parts != _WIRE_PARTS[batch.parts]:
        raise MoeError(
            grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED",
            "this worker's release computes routed and shared experts together only")


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


def read_available(answer, x):
    """[T] bool from token_states. Raises MoeError for a worker that does not know them."""
    if not answer.token_states:
        raise MoeError(grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED",
                       "this worker's release answers no part of a request")
    return array(answer.token_states, np.uint8, (x.shape[0], 1), "token_states")[:, 0] == 0


def read_rehomed(answer):
    """Tuple of ids. Raises MoeError for a worker that does not know return_rehomed."""
    if not answer.HasField("rehomed"):
        raise MoeError(grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED",
                       "this worker's release tells no re-homed experts")
    return tuple(answer.rehomed.experts)


def result(answer, batch, return_routing, partial=False):
    """The result of Client.forward, from an answer to a Batch."""
    check_parts(answer, batch)
    y = batch.give(read_y(answer, batch.x))
    if not return_routing and not partial and not batch.return_rehomed:
        return y
    ids = weights = available = rehomed = None
    if return_routing:
        ids, weights = map(batch.give_routing, read_routing(answer, batch.x))
    if partial:
        available = batch.give_routing(read_available(answer, batch.x))
    if batch.return_rehomed:
        rehomed = read_rehomed(answer)
    return ForwardResult(y, ids, weights, answer.epoch, answer.weights_version, stages(answer),
                         answer.retained, answer.retained_activations, available, rehomed)
