# SPDX-License-Identifier: Apache-2.0
"""The client: unary calls with retries, round robin over workers, and streams."""

import itertools
import operator
import queue
import random
import re
import threading

import grpc
import numpy as np

from . import _errors, _wire
from ._answers import ForwardResult, Layer, ServerInfo
from ._channel import open_channel
from ._retry import RetryPolicy
from ._proto import expert_pb2
from ._renamed import renamed
from ._training import TrainingCalls
from ._trust import Trust

_SERVICE = "/moe.v1.ExpertService/"
_MAX_MESSAGE = 2**31 - 1
_ATTEMPTS = 4
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+(%[^\]]+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def _check_endpoint(endpoint):
    """Checks HOST:PORT. gRPC would take the port modulo 65536, and accept a name without a port."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError("endpoint: %r is not HOST:PORT with a port from 1 to 65535" % endpoint)


def _check_digest(digest):
    if digest is not None and not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError("model_digest has 64 digits of 0-9 a-f, not %r" % (digest,))


class _Worker:
    """One channel and the calls on it."""

    def __init__(self, endpoint, trust):
        self.endpoint = endpoint
        self.channel = open_channel(endpoint, trust, options=[
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
            ("grpc.max_send_message_length", _MAX_MESSAGE),
            # This module retries on another worker; a retry inside the channel would keep a copy.
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            # Finds a restarted worker within 1 s and notices one that vanishes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.dns_min_time_between_resolutions_ms", 200),  # also of numeric addresses
            ("grpc.keepalive_time_ms", 30000),
            ("grpc.keepalive_timeout_ms", 10000),
            ("grpc.http2.max_pings_without_data", 0),
        ])
        self.forward = self._unary("Forward", expert_pb2.ForwardRequest,
                                   expert_pb2.ForwardResponse)
        self.info = self._unary("GetServerInfo", expert_pb2.GetServerInfoRequest,
                                expert_pb2.GetServerInfoResponse)
        self.model = self._unary("GetModel", expert_pb2.GetModelRequest,
                                 expert_pb2.GetModelResponse)
        self.stream = self.channel.stream_stream(
            _SERVICE + "ForwardStream",
            request_serializer=expert_pb2.ForwardStreamRequest.SerializeToString,
            response_deserializer=expert_pb2.ForwardStreamResponse.FromString)

    def _unary(self, name, request, response):
        return self.channel.unary_unary(
            _SERVICE + name, request_serializer=request.SerializeToString,
            response_deserializer=response.FromString)


def _result(answer, x, return_routing):
    y = _wire.read_y(answer, x)
    if not return_routing:
        return y
    ids, weights = _wire.read_routing(answer, x)
    return ForwardResult(y, ids, weights, answer.epoch, answer.weights_version,
                         _wire.stages(answer), answer.retained, answer.retained_activations)


class Client(TrainingCalls):
    """A connection to a group of workers. May be shared between threads.

    endpoint  "host:port" of any worker of the group
    spread    send requests to all workers of the group in turn
    timeout   default limit of a call, in seconds
    model_digest
              digest of the wanted model (ServerInfo.model_digest, `moectl status`): connecting and
              forward passes fail with FAILED_PRECONDITION / MODEL_MISMATCH unless the group serves
              it. None: any
    tls_ca    PEM file of roots: connections use TLS, and the workers' certificates lead to one of
              these and name the host of their endpoint
    tls_certificate, tls_key
              PEM files of the client's own certificate and its key, mode 0600
    tls_server_name
              the name that the workers' certificates must have, instead of the host
    token_file
              a file with a token, mode 0600, shown with each call
    insecure  True: send the token without TLS also to other hosts

    For an argument of the last six that is None, a variable of the environment counts: MOED_TLS_CA,
    MOED_TLS_CERTIFICATE, MOED_TLS_KEY, MOED_TLS_SERVER_NAME, MOED_TOKEN_FILE, MOED_INSECURE=1. A
    worker of the same user on this host is reached by its Unix socket and needs none of them. Files
    are read again when they change; if new ones are not valid, the old ones stay in use.

    Raises MoeError if no worker answers or a file is not valid, ValueError if endpoint is not
    "host:port". Close it, or use it as a context manager.
    """

    def __init__(self, endpoint, spread=False, timeout=60.0, *, model_digest=None, tls_ca=None,
                 tls_certificate=None, tls_key=None, tls_server_name=None, token_file=None,
                 insecure=None):
        _check_endpoint(endpoint)
        _check_digest(model_digest)
        self._model_digest = model_digest or ""
        self._trust = Trust(tls_ca, tls_certificate, tls_key, tls_server_name, token_file,
                            insecure).completed()
        self._timeout = timeout
        self._is_closed = False
        self._workers = [_Worker(endpoint, self._trust)]
        try:
            info = self._workers[0].info(expert_pb2.GetServerInfoRequest(), timeout=timeout)
            model = self._workers[0].model(expert_pb2.GetModelRequest(), timeout=timeout)
        except grpc.RpcError as error:
            self.close()
            raise _errors.from_connect_error(error, endpoint) from None
        except BaseException:
            self.close()
            raise
        self._info = ServerInfo(
            model.model, model.family, info.version, info.backend, info.coordinator,
            tuple(info.workers), info.epoch, model.weights_version, info.max_message_bytes,
            info.max_tokens_per_request, info.max_tokens_per_step, tuple(info.extensions),
            model.model_digest, info.training_endpoint)
        try:
            self.check_model(model_digest)
        except BaseException:
            self.close()
            raise
        self._layers = tuple(
            Layer(each.layer, each.hidden, each.experts, each.top_k, each.intermediate,
                  each.zero_experts, each.shared_intermediate) for each in model.layers)
        self._layer_by_index = {layer.layer: layer for layer in self._layers}
        if spread:
            self._workers += [_Worker(each, self._trust) for slot, each in enumerate(info.workers)
                              if slot != info.slot and each]  # a slot may be empty
        self._next_worker = itertools.count(random.randrange(len(self._workers)))

    def __reduce_ex__(self, protocol):
        raise TypeError("a Client has connections: it cannot be copied or pickled")

    def check_model(self, model_digest):
        """Raises MoeError (MODEL_MISMATCH) if the group served another model than this when the
        client connected. None, and a group that had not formed, pass."""
        _check_digest(model_digest)
        served = self._info.model_digest
        if model_digest and served and model_digest != served:
            raise _errors.MoeError(
                grpc.StatusCode.FAILED_PRECONDITION, "MODEL_MISMATCH",
                "the group serves the model with digest %s" % served)

    @property
    def info(self):
        """ServerInfo: model, limits and addresses."""
        return self._info

    @property
    def layers(self):
        """Tuple of Layer, one for each MoE layer of the model, ascending."""
        return self._layers

    def layer(self, index):
        """The Layer with that index in the model; KeyError if that is not an MoE layer."""
        return self._layer_by_index[index]

    def find_layer(self, layer):
        """The Layer for a Layer or its index. Raises MoeError (LAYER_NOT_FOUND), TypeError."""
        if isinstance(layer, Layer):
            layer = layer.layer
        try:
            layer = operator.index(layer)
        except TypeError:
            raise TypeError("layer must be a Layer or an int, not %r" % (layer,)) from None
        try:
            return self._layer_by_index[layer]
        except KeyError:
            raise _errors.MoeError(
                grpc.StatusCode.NOT_FOUND, "LAYER_NOT_FOUND",
                "model %s has no MoE layer %s" % (self._info.model, layer)) from None

    def _open_worker(self, endpoint):
        _check_endpoint(endpoint)
        return _Worker(endpoint, self._trust)

    @renamed(save="retain")
    def forward(self, layer, x, topk_ids=None, topk_weights=None, return_routing=False,
                timeout=None, epoch=0, weights_version=0, retain=None, patient=None,
                model_digest=None):
        """The output of one MoE layer.

        layer         a Layer, or its index in the model
        x             [T,H] float32 or bfloat16 (see the package's text on bfloat16)
        topk_ids      [T,K] integers: use these experts (-1: none); None: the layer's router chooses
        topk_weights  [T,K] floats: with these weights; None: the router's weights of those experts
        timeout       limit in seconds, retries included; None: the client's
        epoch, weights_version
                      fail with FAILED_PRECONDITION unless the server has these; 0: any
        retain        (session, micro_batch_id): the worker retains the pass for Client.backward
                      under these two. The call then goes to the first worker and to no other
        model_digest  fail unless the group serves this model; None: the client's
        patient       True: wait until `timeout` for a group that lacks a worker, as training calls
                      do. False: give up after 4 attempts. None: True if `retain` is given

        Returns y [T,H] with x's dtype: routed plus shared experts, without the residual; or with
        `return_routing` a ForwardResult. The caller owns the arrays.

        A call that fails with UNAVAILABLE is retried, on another worker if there is one. Raises
        MoeError, and ValueError or TypeError for arguments that cannot be sent.
        """
        request = expert_pb2.ForwardRequest(
            epoch=epoch, weights_version=weights_version,
            model_digest=self._model_digest if model_digest is None else model_digest)
        if retain is not None:
            request.retain.session, request.retain.micro_batch_id = retain
        x = self._fill(request, layer, x, topk_ids, topk_weights, return_routing)
        patient = retain is not None if patient is None else patient
        answer = self._call(request, timeout, home=retain is not None, patient=patient)
        return _result(answer, x, return_routing)

    def _fill(self, request, layer, x, topk_ids, topk_weights, return_routing):
        """Fills the request and returns x as it is sent. Refuses more tokens than the server
        accepts."""
        if self._is_closed:
            raise _errors.closed("client")
        layer, x = self.find_layer(layer), np.asarray(x)
        limit = self._info.max_tokens_per_request
        if x.ndim == 2 and 0 < limit < x.shape[0]:
            raise _errors.MoeError(
                grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_LIMIT",
                "%d tokens; the server accepts at most %d in a request" % (x.shape[0], limit))
        x = _wire.fill_request(request, layer, x, topk_ids, topk_weights, return_routing)
        self._check_message(request)
        return x

    def _check_message(self, request):
        """Refuses a message that is too large for the server, with a clearer text than gRPC's."""
        size, limit = request.ByteSize(), self._info.max_message_bytes
        if 0 < limit < size:
            raise _errors.MoeError(
                grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE",
                "%d tokens are a message of %d bytes; the server accepts at most %d (its "
                "--max-message-bytes): send fewer tokens per call" % (request.tokens, size, limit))

    def _call(self, request, timeout, home=False, patient=False):
        retry = RetryPolicy(self, "Forward", self._timeout if timeout is None else timeout,
                            None if patient else _ATTEMPTS)
        for number in itertools.count(next(self._next_worker)):
            worker = self._workers[0 if home else number % len(self._workers)]
            try:
                return worker.forward(request, timeout=retry.left())
            except grpc.RpcError as error:
                failure = _errors.from_dropped_call(error, worker.endpoint)
            except ValueError:  # gRPC raises it for a closed channel
                if not self._is_closed:
                    raise
            if self._is_closed:
                raise _errors.closed("client")
            retry.wait_or_raise(failure, worker.endpoint)

    def stream(self):
        """A Stream to one worker: less cost per call, no retries. A context manager."""
        if self._is_closed:
            raise _errors.closed("client")
        return Stream(self, self._workers[next(self._next_worker) % len(self._workers)])

    def close(self):
        """Closes the connections; calls in flight fail."""
        self._is_closed = True
        for worker in self._workers:
            worker.channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Pending:
    """A request on a stream without an answer so far."""

    def __init__(self):
        self.over = threading.Event()
        self.answer = None
        self.failure = None


class Stream:
    """One long-lived stream to one worker, from Client.stream. May be shared between threads;
    answers may come in any order. Close it, or use it as a context manager."""

    def __init__(self, client, worker):
        self._client = client
        self._lock = threading.Lock()
        self._pending = {}  # request id -> _Pending
        self._ids = itertools.count(1)
        self._end = None  # MoeError; set when the stream is over or being closed
        self._outgoing = queue.SimpleQueue()
        self._call = worker.stream(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read, name="moed-stream", daemon=True)
        self._reader.start()

    def _read(self):
        end = _errors.MoeError(grpc.StatusCode.UNAVAILABLE, "", "the server ended the stream")
        try:
            for answer in self._call:
                with self._lock:
                    pending = self._pending.pop(answer.request_id, None)
                if pending is None:  # its time is over
                    continue
                if answer.HasField("error"):
                    pending.failure = _errors.from_item_error(answer.error)
                pending.answer = answer
                pending.over.set()
        except grpc.RpcError as error:
            end = _errors.from_dropped_call(error)
        with self._lock:
            if self._client._is_closed:
                end = _errors.closed("client")
            elif self._end is not None:
                end = self._end
            self._end = end
            left = list(self._pending.values())
            self._pending.clear()
        for pending in left:
            pending.failure = end
            pending.over.set()

    def forward(self, layer, x, topk_ids=None, topk_weights=None, return_routing=False,
                timeout=None, epoch=0, weights_version=0):
        """As Client.forward, without retries."""
        request = expert_pb2.ForwardStreamRequest(epoch=epoch, weights_version=weights_version,
                                                  model_digest=self._client._model_digest)
        x = self._client._fill(request, layer, x, topk_ids, topk_weights, return_routing)
        request.request_id = next(self._ids)
        pending = _Pending()
        with self._lock:
            if self._end is not None:
                raise self._end
            self._pending[request.request_id] = pending
        self._outgoing.put(request)
        limit = self._client._timeout if timeout is None else timeout
        if not pending.over.wait(limit):
            with self._lock:
                mine = self._pending.pop(request.request_id, None) is not None
            if mine:
                raise _errors.MoeError(grpc.StatusCode.DEADLINE_EXCEEDED, "",
                                       "no answer on the stream within %g s" % limit)
            pending.over.wait()
        if pending.failure is not None:
            raise pending.failure
        return _result(pending.answer, x, return_routing)

    def close(self):
        """Ends the stream after the answers of requests in flight."""
        with self._lock:
            if self._end is None:
                self._end = _errors.closed("stream")
        self._outgoing.put(None)
        self._reader.join(self._client._timeout)
        self._call.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
