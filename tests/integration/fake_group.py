# SPDX-License-Identifier: Apache-2.0
"""A group that trains, without daemons: one layer, workers in one process, and a ledger of the
calls that they have run. Also a fake coordinator and a fake clock. Import it after `group`, which
finds moed."""

import concurrent.futures
import contextlib
import hashlib
import math

import grpc
import numpy as np

from moed._proto import admin_pb2, expert_pb2, rpc_status_pb2, training_pb2, types_pb2

LAYER, HIDDEN, EXPERTS, TOP_K, STEP_TOKENS = 3, 16, 8, 2, 32


class FakeClock:
    def __init__(self, now):
        self.now = now

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Silence(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.DEADLINE_EXCEEDED


class FakeChannel:
    """A channel to a coordinator that gives these answers, one per call, and then none."""

    def __init__(self, clock, answers):
        self.clock, self.answers = clock, answers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def unary_unary(self, *_, **__):
        def call(_request, timeout):
            if self.answers:
                return self.answers.pop()
            self.clock.sleep(timeout)
            raise Silence()

        return call


class FakeAdmin(grpc.GenericRpcHandler):
    """A coordinator that reports the given status, and `events` and `metrics` if they are set. With
    `leader`, it does not lead."""

    def __init__(self, **status):
        self.events, self.metrics, self.leader, self.calls = None, "", "", 0
        self.status = admin_pb2.GetStatusResponse(**status)
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        self.server.add_generic_rpc_handlers((self,))
        self.endpoint = "127.0.0.1:%d" % self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def service(self, details):
        answers = {"GetStatus": self.status, "ListEvents": self.events,
                   "GetMetrics": admin_pb2.GetMetricsResponse(text=self.metrics)}
        answer = answers.get(details.method.rpartition("/")[2])
        if answer is None:
            return None
        self.calls += 1

        def handle(_request, context):
            if self.leader:
                waits = refused("NOT_LEADER", grpc.StatusCode.UNAVAILABLE,
                                message="the leader is " + self.leader)
                context.set_trailing_metadata((("grpc-status-details-bin", waits.details()),))
                context.abort(waits.code, waits.message)
            return answer

        return grpc.unary_unary_rpc_method_handler(
            handle, response_serializer=lambda answer: answer.SerializeToString())


class Failure(Exception):
    def __init__(self, code, reason="", worker="", message="as wished"):
        super().__init__(reason)
        self.code, self.reason, self.worker, self.message = code, reason, worker, message

    def details(self):
        status = rpc_status_pb2.Status(code=self.code.value[0], message=self.message)
        info = rpc_status_pb2.ErrorInfo(reason=self.reason, domain="moe")
        if self.worker:
            info.metadata["worker"] = self.worker
        status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo",
                           value=info.SerializeToString())
        return status.SerializeToString()


def refused(reason, code=grpc.StatusCode.FAILED_PRECONDITION, worker="", message="as wished"):
    return Failure(code, reason, worker, message)


def unavailable():
    return refused("REFORMING", grpc.StatusCode.UNAVAILABLE)


class Ledger:
    """The calls that a group has run: id -> (content, worker, answer)."""

    def __init__(self):
        self.calls, self.steps, self.backwards, self.lineage = {}, 0, 0, 4

    def last_step_id(self):
        return max([key for key in self.calls if isinstance(key, int)], default=0)


class FakeWorker(grpc.GenericRpcHandler):
    """dx = 3 dy, y = 2 x. `script` has failures for the next calls: `failure` comes before the call
    runs, (failure,) after. `credentials` of gRPC: it uses TLS."""

    def __init__(self, ledger, credentials=None):
        self.tokens = set()  # "Bearer ..." of all calls
        self.ledger, self.script, self.requests, self.retained = ledger, [], [], {}
        self.workers, self.slot, self.coordinator = [], 0, ""
        self.training_endpoint = ""
        self.message_bytes, self.extensions = 1 << 20, ["training"]
        self.seconds_left = None  # until the deadline of the last call
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((self,))
        port = (self.server.add_insecure_port("127.0.0.1:0") if credentials is None
                else self.server.add_secure_port("127.0.0.1:0", credentials))
        self.endpoint = "127.0.0.1:%d" % port
        self.server.start()

    def called(self, context):
        """Before each call."""

    def service(self, details):
        self.tokens.update(value for key, value in details.invocation_metadata
                           if key == "authorization")
        service, name = details.method.rsplit("/", 1)
        module = training_pb2 if service.endswith("TrainingService") else expert_pb2
        request = getattr(module, name + "Request", None)
        function = getattr(self, name, None)
        if request is None or function is None:
            return None

        def handle(message, context):
            self.called(context)
            left = context.time_remaining()
            self.seconds_left = math.inf if left is None else left
            try:
                return self.run(name, function, message)
            except Failure as failure:
                context.set_trailing_metadata((("grpc-status-details-bin", failure.details()),))
                context.abort(failure.code, "as wished")

        return grpc.unary_unary_rpc_method_handler(
            handle, request_deserializer=request.FromString,
            response_serializer=lambda answer: answer.SerializeToString())

    def run(self, name, function, message):
        if name in ("GetServerInfo", "GetModel", "GetTrainState"):
            return function(message)
        self.requests.append((name, message))
        after = None
        if self.script:
            wish = self.script.pop(0)
            if isinstance(wish, tuple):
                after = wish[0]
            elif wish is not None:
                raise wish
        answer = function(message)
        if after is not None:
            raise after
        return answer

    def GetServerInfo(self, _request):
        return expert_pb2.GetServerInfoResponse(
            name="moe-worker", slot=self.slot, workers=self.workers,
            coordinator=self.coordinator, max_tokens_per_request=100,
            max_tokens_per_step=STEP_TOKENS, max_message_bytes=self.message_bytes,
            extensions=self.extensions, training_endpoint=self.training_endpoint)

    def GetModel(self, _request):
        layer = types_pb2.LayerInfo(layer=LAYER, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K)
        return expert_pb2.GetModelResponse(model="fake", layers=[layer])

    def GetTrainState(self, _request):
        known = self.ledger
        return training_pb2.GetTrainStateResponse(
            lineage=known.lineage, weights_version=1 + known.steps, steps=known.steps, optimizer=1,
            backwards=known.backwards, last_step_id=known.last_step_id(), router_frozen=True)

    def Forward(self, request):
        answer = expert_pb2.ForwardResponse(
            tokens=request.tokens, hidden=request.hidden, dtype=request.dtype, top_k=TOP_K,
            weights_version=1 + self.ledger.steps)
        if request.HasField("retain"):
            self.retained[request.retain.session, request.retain.micro_batch_id] = request
            answer.retained = True
        if request.return_routing:
            answer.topk_ids_dtype = types_pb2.DATA_TYPE_U8
            answer.topk_ids = bytes(request.tokens * TOP_K)
            answer.topk_weights = bytes(4 * request.tokens * TOP_K)
        if request.dtype == types_pb2.DATA_TYPE_F32:
            answer.y_data = (2 * np.frombuffer(request.x_data, np.float32)).tobytes()
        else:  # BF16: doubles by adding 1 to the exponent
            answer.y_data = (np.frombuffer(request.x_data, np.uint16) + 0x80).astype(
                np.uint16).tobytes()
        return answer

    def once(self, key, request, make):
        """Runs `make` unless the call has run before."""
        call = type(request).FromString(request.SerializeToString())
        for name in ("x", "topk_ids", "topk_weights", "topk_ids_dtype", "routing_mode"):
            if name in call.DESCRIPTOR.fields_by_name:
                call.ClearField(name)
        content = call.DESCRIPTOR.name, hashlib.sha256(call.SerializeToString()).digest()
        if key in self.ledger.calls:
            known, worker, answer = self.ledger.calls[key]
            if known != content:
                raise refused("ID_REUSED", grpc.StatusCode.ALREADY_EXISTS)
            if isinstance(key, tuple) and worker is not self:
                raise refused("RECORDED_ELSEWHERE", worker=worker.endpoint)
            again = type(answer)()
            again.CopyFrom(answer)
            again.repeated = True
            return again
        answer = make()
        self.ledger.calls[key] = content, self, answer
        return answer

    def Backward(self, request):
        key = request.session, request.micro_batch_id
        if not request.x and key not in self.retained and key not in self.ledger.calls:
            raise refused("RETAINED_PASS_GONE")
        used_retained = not request.x

        def make():
            self.ledger.backwards += not request.input_only
            gradients = np.frombuffer(request.dy, np.float32) * 3
            return training_pb2.BackwardResponse(
                tokens=request.tokens, hidden=request.hidden, dtype=request.dtype, top_k=TOP_K,
                weights_version=1 + self.ledger.steps, lineage=self.ledger.lineage,
                used_retained=used_retained, aux_loss=0.5, dx=gradients.tobytes(),
                weight_gradients=bytes(4 * request.tokens * TOP_K))

        return self.once(key, request, make)

    def OptimizerStep(self, request):
        if request.step_id not in self.ledger.calls and (
                request.expected_backwards not in (0, self.ledger.backwards)):
            raise refused("GRADIENTS_MISSING")

        def make():
            self.ledger.steps += 1
            backwards, self.ledger.backwards = self.ledger.backwards, 0
            return training_pb2.OptimizerStepResponse(
                weights_version=1 + self.ledger.steps, lineage=self.ledger.lineage, grad_norm=1.5,
                backwards=backwards, steps=self.ledger.steps)

        return self.once(request.step_id, request, make)

    def ZeroGrad(self, request):
        def make():
            backwards, self.ledger.backwards = self.ledger.backwards, 0
            return training_pb2.ZeroGradResponse(backwards=backwards)

        return self.once(request.step_id, request, make)

    def SetFrozen(self, request):
        return self.once(request.step_id, request, training_pb2.SetFrozenResponse)

    def SaveCheckpoint(self, request):
        return self.once(request.step_id, request, lambda: training_pb2.SaveCheckpointResponse(
            weights_version=1 + self.ledger.steps, bytes=1000, lineage=self.ledger.lineage))

    def LoadCheckpoint(self, request):
        return self.once(request.step_id, request, lambda: training_pb2.LoadCheckpointResponse(
            weights_version=9, lineage=self.ledger.lineage + 1))

    def RecoverTraining(self, _request):
        return training_pb2.RecoverTrainingResponse()

    def ExportAdapter(self, request):
        return self.once(request.step_id, request,
                         lambda: training_pb2.ExportAdapterResponse(bytes=10))


@contextlib.contextmanager
def fakes(count=1):
    ledger = Ledger()
    workers = [FakeWorker(ledger) for _ in range(count)]
    for slot, worker in enumerate(workers):
        worker.slot, worker.workers = slot, [each.endpoint for each in workers]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.server.stop(None).wait()


def rows(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


IDS = np.zeros((4, TOP_K), np.int32)
