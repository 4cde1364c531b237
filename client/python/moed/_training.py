# SPDX-License-Identifier: Apache-2.0
"""Calls of moe.v1.TrainingService: gradients, optimizer steps, checkpoints.

Every call that changes something has an id and runs at most once under it. So a call that fails
with UNAVAILABLE is sent again under its id until it is answered or its time is over. If another
worker has the recorded answer, that worker is asked.
"""

import itertools
import re
import uuid

import grpc
import numpy as np

from . import _errors, _wire
from ._answers import Checkpoint, CheckpointInfo, Gradients, StepResult, TrainState
from ._dtypes import to_wire
from ._retry import RetryPolicy
from ._proto import training_pb2, types_pb2
from ._renamed import renamed

_SERVICE = "/moe.v1.TrainingService/"
_OPTIMIZERS = {None: 0, "adamw": 1, "sgd": 2}

_PARTS = ("router", "experts", "shared")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def _check_id(what, value):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError("%s must be an integer, not %r" % (what, value))
    if not 1 <= value < 2**63:
        raise ValueError("%s must be from 1 to 2^63 - 1, not %d" % (what, value))
    return int(value)


def _check_name(what, value):
    if not isinstance(value, str):
        raise TypeError("%s must be a string, not %r" % (what, value))
    if not _NAME.fullmatch(value):
        raise ValueError(
            "%s must be 1 to 64 characters of [A-Za-z0-9._-], no dot first, "
            "not %r" % (what, value))
    return value


_AUX_CONVENTIONS = {
    "mean": training_pb2.AUX_CONVENTION_UNSPECIFIED,  # 0, which older groups accept too
    "transformers": training_pb2.AUX_CONVENTION_TRANSFORMERS,
}


def check_aux_convention(name):
    """The number of the convention in a message."""
    if name not in _AUX_CONVENTIONS:
        raise ValueError("aux_convention: %r is neither %s" % (
            name, " nor ".join(map(repr, _AUX_CONVENTIONS))))
    return _AUX_CONVENTIONS[name]


class TrainingCalls:
    """The training calls of Client.

    Arguments of all changes: `step_id` increases from change to change, in one sequence for all
    clients of a group (train_state().last_step_id + 1 is free). `session` is the owner of the
    change. If a change is repeated under the same id and session, it does not run again: the first
    answer comes again. An id that another session has used is refused with ID_REUSED. None: a
    random name of this Client; a program that must find its changes after a restart gives a name.
    `lineage` 0: any."""

    @renamed(saved="retained")
    def backward(self, layer, dy, x=None, topk_ids=None, topk_weights=None, *, session,
                 micro_batch_id, retained=False, weights_version=0, lineage=0, input_only=False,
                 return_weight_gradients=False, aux_coeff=0.0, aux_convention="mean",
                 timeout=None):
        """Gradients of one layer for one micro batch. Adds the parameters' gradients to those of
        the next optimizer_step.

        layer           a Layer, or its index in the model
        dy              [T,H] float32 or bfloat16, gradient of the layer's output; T is at most
                        info.max_tokens_per_step
        x               [T,H], dtype of dy: the layer's input
        topk_ids        [T,K] integers that the forward pass used (from return_routing)
        topk_weights    [T,K] floats that the forward pass was given; None: the server computes the
                        weights again, and the router learns
        session         1 to 64 characters of [A-Za-z0-9._-], no dot first
        micro_batch_id  at least 1; increases with every backward of the session
        retained        a forward pass was retained under this session and id: x is sent only if the
                        worker has dropped it (without x: RETAINED_PASS_GONE)
        weights_version of the forward pass; 0: any (not with `retained` and x)
        input_only      only dx and the routing weights' gradients; those of the parameters stay
        aux_coeff       coefficient of the load-balance loss of this layer and pass. With "mean" it
                        is K times transformers' router_aux_loss_coef for the same loss
        aux_convention  "mean": the loss is E / (K T^2) times the sum over experts of choices times
                        scores: 1 if all experts are chosen equally often. "transformers": E / T^2,
                        as load_balancing_loss_func, so its coefficient fits unchanged (it pools all
                        layers before the product; here each layer has a separate loss)

        Returns Gradients. Raises MoeError, and ValueError or TypeError for arguments that cannot be
        sent.
        """
        layer = self.find_layer(layer)
        dy = np.asarray(dy)
        request = training_pb2.BackwardRequest(
            model=self._model, layer=layer.layer, session=_check_name("session", session),
            micro_batch_id=_check_id("micro_batch_id", micro_batch_id),
            weights_version=weights_version, lineage=lineage, input_only=input_only,
            return_weight_gradients=return_weight_gradients, aux_coeff=aux_coeff,
            aux_convention=check_aux_convention(aux_convention))
        if x is None and not retained:
            raise ValueError("x is missing, and no pass was retained")
        if x is None and (topk_ids is not None or topk_weights is not None):
            raise ValueError("routing is given without x")
        if retained and x is not None and weights_version == 0:
            raise ValueError(
                "with retained and x, give the weights_version of the retained pass")
        dy = self._fill_gradient(request, layer, dy)
        if retained:
            self._check_message(request)
        retry = self._retry_policy("Backward", timeout)
        if retained:
            try:
                answer = self._train("Backward", request, retry, home=True, once=x is not None)
                return self._gradients(answer, dy, return_weight_gradients)
            except _errors.MoeError as error:
                if x is None or (error.reason != "RETAINED_PASS_GONE"
                                 and error.code != grpc.StatusCode.UNAVAILABLE):
                    raise
        self._fill_input(request, layer, dy, x, topk_ids, topk_weights)
        self._check_message(request)
        answer = self._train("Backward", request, retry)
        return self._gradients(answer, dy, return_weight_gradients)

    def optimizer_step(self, learning_rate, *, step_id, session=None, lineage=0, optimizer=None,
                       weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, momentum=0.0,
                       max_grad_norm=0.0, grad_scale=1.0, balance_rate=0.0, expected_backwards=0,
                       timeout=None):
        """Moves all parameters that are not frozen, on all workers at once, and clears the
        gradients. betas may be 0; eps and grad_scale must not be 0. max_grad_norm or balance_rate
        0: never; expected_backwards 0: any number. Returns StepResult."""
        if optimizer not in _OPTIMIZERS:
            raise ValueError("optimizer must be None, 'adamw' or 'sgd', not %r" % (optimizer,))
        if momentum != 0 and optimizer == "adamw":
            raise ValueError("momentum is SGD's; adamw has betas")
        answer = self._train("OptimizerStep", training_pb2.OptimizerStepRequest(
            **self._change(step_id, session, lineage), optimizer=_OPTIMIZERS[optimizer],
            learning_rate=learning_rate, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1],
            epsilon=eps, momentum=momentum, max_grad_norm=max_grad_norm, grad_scale=grad_scale,
            balance_rate=balance_rate, expected_backwards=expected_backwards),
            self._retry_policy("OptimizerStep", timeout))
        return StepResult(answer.weights_version, answer.lineage, answer.skipped_nonfinite,
                          answer.grad_norm, answer.backwards, answer.steps, answer.repeated)

    def zero_grad(self, *, step_id, session=None, lineage=0, timeout=None):
        """Clears all gradients since the last step. Returns the number of their backward calls."""
        return self._train("ZeroGrad", training_pb2.ZeroGradRequest(
            **self._change(step_id, session, lineage)),
            self._retry_policy("ZeroGrad", timeout)).backwards

    def set_frozen(self, parts, *, step_id, session=None, lineage=0, timeout=None):
        """Freezes these of "router", "experts", "shared"; all others learn."""
        if isinstance(parts, str) or set(parts) - set(_PARTS):
            raise ValueError("parts must be of %s, not %r" % (", ".join(_PARTS), parts))
        self._train("SetFrozen", training_pb2.SetFrozenRequest(
            **self._change(step_id, session, lineage),
            **{part: True for part in parts}),
            self._retry_policy("SetFrozen", timeout))

    def train_state(self, timeout=None):
        """TrainState. Raises MoeError with UNIMPLEMENTED if the group does not train."""
        answer = self._train("GetTrainState", training_pb2.GetTrainStateRequest(),
                             self._retry_policy("GetTrainState", timeout))
        return TrainState(
            answer.lineage, answer.weights_version, answer.steps, answer.backwards,
            answer.last_step_id, "sgd" if answer.optimizer == _OPTIMIZERS["sgd"] else "adamw",
            frozenset(part for part in _PARTS if getattr(answer, part + "_frozen")),
            answer.lora_rank, answer.lora_scale, tuple(answer.lora_targets), answer.checkpoint,
            answer.state_bytes, answer.retained_bytes, answer.retained_bytes_limit, answer.saving,
            answer.loading, answer.problem, answer.unsaved_steps, answer.retained_device_bytes,
            answer.retained_device_bytes_limit, answer.progress_bytes, answer.progress_bytes_total,
            tuple((b.session, b.micro_batch_id) for b in answer.lost_micro_batches),
            answer.lost_backwards)

    def save_checkpoint(self, name, *, step_id, session=None, lineage=0, keep=0, timeout=None):
        """Writes weights and optimizer state into directory `name` of the workers' training root,
        while forward passes and training go on. Then removes all but the `keep` newest checkpoints
        that this group saved (0: none). Never removes a checkpoint of another training or one that
        was loaded. After `timeout` seconds the Save is cancelled; None: no limit, but if no worker
        answers for the client's timeout, the call fails. Returns Checkpoint."""
        answer = self._train("SaveCheckpoint", training_pb2.SaveCheckpointRequest(
            **self._change(step_id, session, lineage),
            name=_check_name("name", name), keep=keep),
            self._retry_policy("SaveCheckpoint", timeout, limited=False))
        return Checkpoint(answer.weights_version, answer.bytes, answer.lineage, answer.repeated,
                          tuple(answer.removed), answer.steps)

    def load_checkpoint(self, name, *, step_id, session=None, lineage=0, timeout=None):
        """Loads weights and optimizer state from checkpoint `name`. `timeout` as in
        save_checkpoint. Returns Checkpoint."""
        answer = self._train(
            "LoadCheckpoint",
            training_pb2.LoadCheckpointRequest(**self._change(step_id, session, lineage),
                                               name=_check_name("name", name)),
            self._retry_policy("LoadCheckpoint", timeout, limited=False))
        return Checkpoint(answer.weights_version, 0, answer.lineage, answer.repeated, (),
                          answer.steps, answer.lost_steps, answer.lost_backwards)

    def export_adapter(self,
                       name="",
                       *,
                       step_id,
                       session=None,
                       lineage=0,
                       merge=False,
                       timeout=None):
        """Writes the adapters for PEFT into directory `name`. With `merge` and no name, merges them
        into the weights and starts new ones. `timeout` as in save_checkpoint. Returns
        Checkpoint."""
        answer = self._train("ExportAdapter", training_pb2.ExportAdapterRequest(
            **self._change(step_id, session, lineage),
            name=_check_name("name", name) if name or not merge else "", merge=merge),
            self._retry_policy("ExportAdapter", timeout, limited=False))
        return Checkpoint(0, answer.bytes, 0, answer.repeated)

    def list_checkpoints(self, limit=0, timeout=None):
        """A list of CheckpointInfo for the workers' training root: checkpoints first, newest first.
        At most `limit` entries, 1000 at most; 0: 1000. The group need not serve."""
        answer = self._train("ListCheckpoints", training_pb2.ListCheckpointsRequest(limit=limit),
                             self._retry_policy("ListCheckpoints", timeout))
        names = {number: name for name, number in _OPTIMIZERS.items()}
        return [CheckpointInfo(
            c.name, c.problem, c.readable, c.steps, c.weights_version, c.lineage, c.parent,
            c.made_s, c.bytes, names.get(c.optimizer),
            frozenset(part for part in _PARTS if getattr(c, part + "_frozen")), c.lora_rank,
            c.lora_alpha, tuple(c.lora_targets)) for c in answer.checkpoints]

    def recover_training(self, name="", *, as_loaded=False, timeout=None):
        """For a group that does not form because it cannot go back to its last checkpoint
        (TrainState.problem): chooses checkpoint `name`, or with `as_loaded` the model as loaded.
        Later steps are lost. The group tries at once, under a new lineage; when it has succeeded,
        train_state().problem is empty. Errors: FAILED_PRECONDITION if the group serves (use
        load_checkpoint), NOT_FOUND if there is no such checkpoint."""
        if bool(name) == bool(as_loaded):
            raise ValueError("either the name of a checkpoint, or as_loaded=True")
        self._train("RecoverTraining", training_pb2.RecoverTrainingRequest(
            name="" if as_loaded else _check_name("name", name), as_loaded=as_loaded),
            self._retry_policy("RecoverTraining", timeout))

    # ------------------------------------------------------------------ implementation

    def _change(self, step_id, session, lineage):
        """The common fields of all changes."""
        if session is None:
            session = self.__dict__.setdefault("_change_session", "python-" + uuid.uuid4().hex)
        return {"step_id": _check_id("step_id", step_id), "lineage": lineage,
                "session": _check_name("session", session) if session != "" else ""}

    def _retry_policy(self, name, timeout, limited=True):
        if timeout is None and limited:
            timeout = self._timeout
        return RetryPolicy(self, name, timeout)

    def _fill_gradient(self, request, layer, dy):
        if dy.ndim != 2 or dy.shape[0] == 0 or dy.shape[1] != layer.hidden:
            raise ValueError("dy has shape %s, expected [T, %d] with T >= 1"
                             % (dy.shape, layer.hidden))
        limit = self._info.max_tokens_per_step
        if 0 < limit < dy.shape[0]:
            raise _errors.MoeError(
                grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_LIMIT",
                "%d tokens; the server accepts at most %d in a Backward" % (dy.shape[0], limit))
        request.dtype, dy = to_wire(dy, "dy")
        request.tokens, request.hidden = dy.shape
        request.dy = dy.tobytes()
        return dy

    @staticmethod
    def _fill_input(request, layer, dy, x, topk_ids, topk_weights):
        x = np.asarray(x)
        if x.shape != dy.shape:
            raise ValueError("x has shape %s, dy %s" % (x.shape, dy.shape))
        if topk_ids is None:
            raise ValueError("backward needs the topk_ids that the forward pass used")
        dtype, x = to_wire(x)
        if dtype != request.dtype:
            raise TypeError("x and dy must have one dtype")
        shape = (x.shape[0], layer.top_k)
        request.x = x.tobytes()
        request.routing_mode = types_pb2.ROUTING_MODE_CLIENT_IDS
        request.topk_ids_dtype = types_pb2.DATA_TYPE_I32
        request.topk_ids = _wire.checked_ids(topk_ids, shape).tobytes()
        if topk_weights is not None:
            request.routing_mode = types_pb2.ROUTING_MODE_CLIENT_IDS_AND_WEIGHTS
            request.topk_weights = _wire.checked_weights(topk_weights, shape).tobytes()

    @staticmethod
    def _gradients(answer, dy, weights_wanted):
        if (answer.tokens, answer.hidden) != dy.shape:
            raise ValueError("broken answer from the server: dx has another shape than dy")
        weights = None
        if weights_wanted:
            weights = _wire.array(answer.weight_gradients, np.float32,
                                  (dy.shape[0], answer.top_k), "weight_gradients")
        return Gradients(
            _wire.array(answer.dx, dy.dtype, dy.shape, "dx"), weights, answer.aux_loss,
            answer.epoch, answer.weights_version, answer.lineage, answer.repeated,
            answer.used_retained, _wire.stages(answer), answer.used_activations)

    def _train(self, name, request, retry, home=False, once=False):
        """The answer. home: only the first worker can execute the call. once: no retry."""
        answer_type = getattr(training_pb2, name + "Response")
        for attempt in itertools.count():
            if self._is_closed:
                raise _errors.closed("client")
            worker = self._workers[0 if home else attempt % len(self._workers)]
            try:
                return self._train_once(worker, name, request, answer_type, retry)
            except _errors.MoeError as error:
                failure = error
            retry.wait_or_raise(failure, worker.endpoint, once)

    def _does_not_train(self, failure):
        """Replaces gRPC's text for a service that the server does not have."""
        if failure.code != grpc.StatusCode.UNIMPLEMENTED:
            return failure
        if self._info.training_endpoint:
            return _errors.MoeError(failure.code, failure.reason, "this address refuses training: "
                                    "trainers connect to %s, without spread"
                                    % self._info.training_endpoint)
        if "training" in self._info.extensions:
            return failure
        return _errors.MoeError(failure.code, failure.reason, "this group does not train: its "
                                "workers were started without --training")

    def _train_once(self, worker, name, request, answer_type, retry):
        try:
            return self._train_on(worker, name, request, answer_type, retry)
        except _errors.MoeError as error:
            if error.reason != "RECORDED_ELSEWHERE" or not error.worker:
                raise
            elsewhere = error.worker
        worker = self._open_worker(elsewhere)
        try:
            return self._train_on(worker, name, request, answer_type, retry)
        finally:
            worker.channel.close()

    def _train_on(self, worker, name, request, answer_type, retry):
        call = worker.channel.unary_unary(
            _SERVICE + name, request_serializer=type(request).SerializeToString,
            response_deserializer=answer_type.FromString)
        try:
            return call(request, timeout=retry.left())
        except grpc.RpcError as error:
            failure = _errors.from_dropped_call(error, worker.endpoint)
            raise self._does_not_train(failure) from None
        except ValueError:  # gRPC raises it for a closed channel
            if not self._is_closed:
                raise
            raise _errors.closed("client") from None
