# SPDX-License-Identifier: Apache-2.0
"""The client: forward passes with retries, round robin over workers. Forward passes go through
libmoeclient where the extension is installed, and all other calls through grpcio."""

import concurrent.futures
import itertools
import operator
import os
import random
import re
import threading
import time
import weakref

import grpc

from . import _errors, _native_calls, _wire
from ._answers import Layer, ServerInfo
from ._channel import open_channel
from ._regions import Regions
from ._retry import RetryPolicy
from ._proto import expert_pb2
from ._renamed import renamed
from ._stream import GrpcLane, Stream
from ._tensors import Batch
from ._training import TrainingCalls
from ._trust import Trust

_SERVICE = "/moe.v1.ExpertService/"
_MAX_MESSAGE = 2**31 - 1
_ATTEMPTS = 4
_THREADS = 64  # passes that grpcio has in flight for futures
_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+(%[^\]]+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def _check_endpoint(endpoint):
    """Checks HOST:PORT. gRPC would take the port modulo 65536, and accept a name without a port."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError("endpoint: %r is not HOST:PORT with a port from 1 to 65535" % endpoint)


def _check_digest(digest):
    if digest is not None and not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError("model_digest has 64 digits of 0-9 a-f, not %r" % (digest,))


def _check_model_name(model):
    if model is not None and (not isinstance(model, str) or not 1 <= len(model.encode()) <= 255):
        raise ValueError("model is the name of a model, not %r" % (model,))


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


class Client(TrainingCalls):
    """A connection to a group of workers. May be shared between threads.

    endpoint  "host:port" of any worker of the group
    spread    send requests to all workers of the group in turn
    timeout   default limit of a call, in seconds
    model     name of the model that all calls of this client go to (Client.models). None: the
              default model of the group. Only that one can train
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
    transport of forward passes. "native": libmoeclient, by the extension moed._native. "grpc":
              grpcio. "auto": the extension if it is installed. None: MOED_TRANSPORT, or "auto".
              Answers, codes and reasons are the same; texts may differ
    spin_us   how long a connection of libmoeclient spins for the next answer: lower latency for one
              core. Without the extension it has no effect
    retry_time
              how long a forward pass that fails with UNAVAILABLE may be retried, in seconds, from
              its start and within its timeout. None: up to 4 attempts
    hedge     True: after UNAVAILABLE, a forward pass goes to the next worker at once, also without
              `spread`, and pauses only when all have refused it. Passes with `retain`, and training
              calls, stay with their worker
    attempt_time
              with `hedge`: a worker that has not answered after so many seconds, as one that is
              stopped, counts as one that refuses; twice as long each time all have been asked. The
              last attempt has the rest of the call's time. Choose more than a call takes
    float16   "refuse": a TypeError for x of float16, which workers do not have. "convert": x goes
              as float32, and y is rounded to float16

    For an argument from tls_ca to insecure that is None, a variable of the environment counts:
    MOED_TLS_CA, MOED_TLS_CERTIFICATE, MOED_TLS_KEY, MOED_TLS_SERVER_NAME, MOED_TOKEN_FILE,
    MOED_INSECURE=1. A worker of the same user on this host is reached by its Unix socket and needs
    none of them. Files are read again when they change; if new ones are not valid, the old ones
    stay in use.

    Raises MoeError if no worker answers, the group has no such model (MODEL_NOT_FOUND), or a file
    is not valid, ValueError if endpoint is not "host:port", ImportError for transport="native"
    without the extension. Close it, or use it as a context manager.

    A Client does not survive fork: in the child, its calls raise RuntimeError. Open another one
    there, best before the parent has opened any: gRPC itself is not made for fork. If the parent
    has a Client, "auto" is grpcio there, and "native" fails with FAILED_PRECONDITION.
    On Debian 13 a fork does not return while a Client is open, because gRPC there waits for its
    own threads: start children by subprocess without preexec_fn, or close the Client first.
    """

    def __init__(self, endpoint, spread=False, timeout=60.0, *, model=None, model_digest=None,
                 tls_ca=None, tls_certificate=None, tls_key=None, tls_server_name=None,
                 token_file=None, insecure=None, transport=None, spin_us=0, float16="refuse",
                 retry_time=None, hedge=False, attempt_time=None):
        if float16 not in ("refuse", "convert"):
            raise ValueError('float16 is "refuse" or "convert", not %r' % (float16,))
        timeout = _errors.limit(timeout)
        retry_time = _errors.limit(retry_time, "retry_time")
        attempt_time = _errors.limit(attempt_time, "attempt_time")
        if attempt_time is not None and attempt_time <= 0:
            raise ValueError("attempt_time is more than 0 seconds, not %r" % (attempt_time,))
        if attempt_time is not None and not hedge:
            raise ValueError("attempt_time is for clients with hedge")
        native = _native_calls.choose(transport)
        _check_endpoint(endpoint)
        _check_digest(model_digest)
        _check_model_name(model)
        self._model = model or ""
        self._model_digest = model_digest or ""
        self._trust = Trust(tls_ca, tls_certificate, tls_key, tls_server_name, token_file,
                            insecure).completed()
        self._timeout = timeout
        self._retry_time, self._hedge = retry_time, bool(hedge)
        self._attempt_time = attempt_time
        self._is_closed = False
        self._process = os.getpid()
        self._convert_half = float16 == "convert"
        self._connection = self._lane = self._threads = None
        self._children = weakref.WeakSet()  # lanes of streams, and Regions
        self._lock = threading.Lock()
        self._workers = [_Worker(endpoint, self._trust)]
        try:
            info = self._workers[0].info(expert_pb2.GetServerInfoRequest(), timeout=timeout)
            served = self._workers[0].model(expert_pb2.GetModelRequest(model=self._model),
                                            timeout=timeout)
        except grpc.RpcError as error:
            self.close()
            raise _errors.from_connect_error(error, endpoint) from None
        except BaseException:
            self.close()
            raise
        self._info = ServerInfo(
            served.model, served.family, info.version, info.backend, info.coordinator,
            tuple(info.workers), info.epoch, served.weights_version, info.max_message_bytes,
            info.max_tokens_per_request, info.max_tokens_per_step, tuple(info.extensions),
            served.model_digest, info.training_endpoint, tuple(info.models))
        try:
            self.check_model(model_digest)
        except BaseException:
            self.close()
            raise
        self._layers = tuple(
            Layer(each.layer, each.hidden, each.experts, each.top_k, each.intermediate,
                  each.zero_experts, each.shared_intermediate, each.routes_by_token_id,
                  each.vocabulary)
            for each in served.layers)
        self._layer_by_index = {layer.layer: layer for layer in self._layers}
        if spread or hedge:
            self._workers += [_Worker(each, self._trust) for slot, each in enumerate(info.workers)
                              if slot != info.slot and each]  # a slot may be empty
        self._spread = bool(spread)
        self._next_worker = itertools.count(random.randrange(len(self._workers)))
        if native is not None:
            try:
                self._connection = _native_calls.Connection(
                    native, endpoint, spread, timeout, spin_us, self._trust, model, model_digest,
                    retry_time, self._hedge, attempt_time)
            except BaseException:
                self.close()
                raise
            self._lane = self._connection.lane

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
    def models(self):
        """Tuple of the names of the models that the worker served when the client connected, the
        default model first. Empty if the group had not formed."""
        return self._info.models

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
                model_digest=None, parts="both", on_unavailable="wait", token_ids=None,
                return_rehomed=False):
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
        parts         "routed": y without shared experts. "shared": shared experts alone, zeros if a
                      layer has none, and without routing. Neither can be retained for Backward
        on_unavailable
                      for groups with --partial-views, if experts of some tokens have no copy now.
                      "wait": until they have one, or `timeout`. "fail": raise EXPERT_UNAVAILABLE.
                      "partial": a ForwardResult of the other tokens; its `available` tells them
        token_ids     [T] integers below layer.vocabulary, for a layer with routes_by_token_id: the
                      model's table gives the experts, and the router their weights. Excludes
                      topk_ids
        return_rehomed
                      return a ForwardResult with the layer's `rehomed_experts`: the view lacks the
                      slot of one of their copies, and another copy computes its rows

        x, topk_ids, topk_weights and token_ids are numpy arrays, torch tensors, or other tensors
        with __dlpack__ in the host's memory. Torch tensors of other devices go through the host.

        Returns y [T,H] with x's dtype: routed plus shared experts, without the residual; or with
        `return_routing` or `return_rehomed` a ForwardResult. If x is a torch tensor, the arrays of
        the answer are torch tensors on its device, otherwise numpy arrays. The caller owns them.

        A call that fails with UNAVAILABLE is retried, on another worker if there is one. Raises
        MoeError, and ValueError or TypeError for arguments that cannot be sent.
        """
        patient = retain is not None if patient is None else patient
        if retain is not None and parts != "both":
            raise ValueError("parts: a pass that is retained for Backward computes both")
        if retain is not None and on_unavailable == "partial":
            raise ValueError("on_unavailable: a pass that is retained for Backward has all tokens")
        policy = _wire.policy_number(on_unavailable)
        batch = self._batch(layer, x, topk_ids, topk_weights, return_routing, parts, token_ids,
                            return_rehomed)
        timeout = self._timeout if timeout is None else timeout
        native = self._lane is not None and retain is None and not policy
        if native and model_digest in (None, self._model_digest):
            begun = time.monotonic()
            try:
                return self._lane.forward(batch, return_routing, timeout, epoch, weights_version)
            except _errors.MoeError as failure:
                if not patient or failure.code != grpc.StatusCode.UNAVAILABLE:
                    raise
            timeout = max(begun + timeout - time.monotonic(), 0)
        return self._forward(batch, return_routing, timeout, epoch, weights_version, retain,
                             patient, model_digest, policy)

    def submit(self, layer, x, topk_ids=None, topk_weights=None, return_routing=False,
               timeout=None, epoch=0, weights_version=0, parts="both", token_ids=None,
               return_rehomed=False):
        """Starts a forward pass and returns at once: a concurrent.futures.Future of what `forward`
        would return or raise. Arguments that cannot be sent raise here.

        Until the end of the pass x must not change. Future.cancel() gives the answer up; the
        request goes on at the worker. With the extension any number is in flight; without it 64,
        and later ones wait for their turn. Callbacks of a future run in a thread of the package and
        must not block.
        """
        batch = self._batch(layer, x, topk_ids, topk_weights, return_routing, parts, token_ids,
                            return_rehomed)
        return self._submit(batch, return_routing, timeout, epoch, weights_version)

    def _submit(self, *arguments):
        if self._lane is not None:
            return self._lane.submit(*arguments)
        return self._pool().submit(self._forward, *arguments)

    def _pool(self):
        """Threads that wait for grpcio."""
        with self._lock:
            if self._is_closed:
                raise _errors.closed("client")
            if self._threads is None:
                self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, "moed-submit")
            return self._threads

    def _make_queue(self):
        """A queue of moed._native for an event loop; None without the extension."""
        return None if self._connection is None else self._connection.make_queue()

    def _forward(self, batch, return_routing, timeout, epoch, weights_version, retain=None,
                 patient=False, model_digest=None, policy=0):
        """A forward pass through grpcio."""
        request = expert_pb2.ForwardRequest(
            model=self._model, epoch=epoch, weights_version=weights_version, on_unavailable=policy,
            model_digest=self._model_digest if model_digest is None else model_digest)
        if retain is not None:
            request.retain.session, request.retain.micro_batch_id = retain
        self._fill(request, batch, return_routing)
        answer = self._call(request, timeout, home=retain is not None, patient=patient)
        return _wire.result(answer, batch, return_routing,
                            policy == _wire.policy_number("partial"))

    def _batch(self, layer, x, topk_ids, topk_weights, return_routing, parts, token_ids,
               return_rehomed):
        """The checked arguments of a forward pass. Refuses more tokens than the server accepts."""
        if not self._is_own_process():
            raise RuntimeError("a Client does not survive fork: open one in the child")
        if self._is_closed:
            raise _errors.closed("client")
        return Batch(self.find_layer(layer), x, topk_ids, topk_weights, return_routing, parts,
                     token_ids, return_rehomed, self._info.max_tokens_per_request,
                     self._convert_half)

    def _is_own_process(self):
        """False in the child of a fork."""
        return os.getpid() == self._process

    def _fill(self, request, batch, return_routing):
        """Fills the request."""
        _wire.fill_request(request, batch, return_routing)
        self._check_message(request)

    def _check_message(self, request):
        """Refuses a message that is too large for the server, with a clearer text than gRPC's."""
        size, limit = request.ByteSize(), self._info.max_message_bytes
        if 0 < limit < size:
            raise _errors.MoeError(
                grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE",
                "%d tokens are a message of %d bytes; the server accepts at most %d (its "
                "--max-message-bytes): send fewer tokens per call" % (request.tokens, size, limit))

    def _call(self, request, timeout, home=False, patient=False):
        by_time = patient or self._retry_time is not None
        retry = RetryPolicy(self, "Forward", self._timeout if timeout is None else timeout,
                            None if by_time else _ATTEMPTS,
                            None if patient else self._retry_time,
                            len(self._workers) - 1 if self._hedge and not home else 0,
                            self._attempt_time)
        for number in itertools.count(next(self._next_worker) if self._spread else 0):
            worker = self._workers[0 if home else number % len(self._workers)]
            try:
                return worker.forward(request, timeout=retry.left())
            except grpc.RpcError as error:
                failure = retry.judge(_errors.from_dropped_call(error, worker.endpoint))
            except ValueError:  # gRPC raises it for a closed channel
                if not self._is_closed:
                    raise
            if self._is_closed:
                raise _errors.closed("client")
            retry.wait_or_raise(failure, worker.endpoint,
                                once=failure.reason == "EXPERT_UNAVAILABLE")

    def stream(self):
        """A Stream to one worker: less cost per call, no retries. A context manager."""
        if self._is_closed:
            raise _errors.closed("client")
        if self._connection is not None:
            lane = self._connection.open_stream()
            self._children.add(lane)
        else:
            number = next(self._next_worker) if self._spread else 0
            lane = GrpcLane(self, self._workers[number % len(self._workers)])
        return Stream(self, lane)

    def open_regions(self, timeout=None, spin_us=0):
        """Regions: memory that this process shares with a worker of its host, so that no tensor is
        sent. The worker needs --allow-client-memory, and the client the extension.

        timeout  limit of each request, in seconds; None: the client's
        spin_us  how long RegionRequest.result polls before it sleeps: lower latency for one core

        Raises MoeError: FAILED_PRECONDITION / UNSUPPORTED (the worker shares no memory),
        UNAVAILABLE / IO (it runs on another host, or as another user), UNIMPLEMENTED / UNSUPPORTED
        (without the extension, or for another model than the default one).
        """
        if self._is_closed:
            raise _errors.closed("client")
        if self._connection is None:
            raise _errors.MoeError(grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED",
                                   "shared memory needs the extension moed._native")
        regions = Regions(self, self._connection.open_session(
            self._timeout if timeout is None else timeout, spin_us))
        self._children.add(regions)
        return regions

    def close(self):
        """Closes the connections; calls in flight fail. Closes streams and Regions too."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, None
        if not self._is_own_process():
            return
        for child in list(self._children):
            child.close("client")
        if self._connection is not None:
            self._connection.close("client")
            self._connection = None
        for worker in self._workers:
            worker.channel.close()
        if threads is not None:
            threads.shutdown(wait=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
