# SPDX-License-Identifier: Apache-2.0
"""Remote MoE layers inside a PyTorch model. Import it separately; it needs torch:

    import moed, moed.torch

    client = moed.Client("127.0.0.1:7600")
    moe = moed.torch.RemoteMoE(client.layers[0], client)
    remote = moed.torch.RemoteOptimizer([moe], lr=1e-4)
    local = torch.optim.AdamW(model.parameters())
    for x, target in batches:
        loss(model(x), target).backward()      # the layers' gradients stay on the workers
        remote.step()
        local.step(); local.zero_grad()

The layer's parameters, their gradients and the optimizer's state are on the workers; torch sees a
function of x. A remote layer in a local module works as any other. Tensors are float32 or bfloat16,
on any device (moed copies them through the host), of any shape [..., H].
"""

import collections
import threading
import uuid

import grpc
import numpy as np
import torch

from . import _graph
from ._errors import MoeError
from ._renamed import renamed
from ._training import check_aux_convention

_IDS_TRIED = 16  # by one change, if other trainers take the ids
_MESSAGE_SLACK = 8192  # bytes of a message that are not tensors
# Retained passes of compiled graphs; for older ones backward sends x.
_RETAINED = 65536

__all__ = ["RemoteMoE", "RemoteOptimizer", "Session"]


def _to_numpy(tensor):
    """Contiguous array on the host; bfloat16 as uint16 bits."""
    tensor = tensor.detach().to("cpu").contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    raise TypeError("a remote layer accepts float32 or bfloat16, not %s" % tensor.dtype)


def _to_torch(array, like):
    """`array` as a tensor with the dtype and device of `like`."""
    if like.dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(like.device)
    return torch.from_numpy(array).to(like.device)


def _with_advice(error):
    """The error; the texts of STATE_LOST and GRADIENTS_LOST get the remedy."""
    advice = " (session.refresh() adopts the group's present state)"
    lost = getattr(error, "reason", "") in ("STATE_LOST", "GRADIENTS_LOST")
    if lost and not error.message.endswith(advice):
        error.message += advice
        error.args = (error.args[0] + advice,)
    return error


class Session:
    """The common state of a model's layers in training: the session's name, the ids of micro
    batches and changes, and the lineage. Layers without an explicit session share the client's.
    Several threads may run passes; only one may make changes.

    client     moed.Client
    name       1 to 64 characters of [A-Za-z0-9._-], unique among trainers; None: a random name
    lineage    attribute: lineage of the weights, as of creation or the last `refresh`
    optimizer  attribute: the workers' optimizer, "adamw" or "sgd"
    """

    def __init__(self, client, name=None):
        self.client = client
        self.name = name or "torch-" + uuid.uuid4().hex
        self._lock = threading.Lock()
        self._batch = 0
        self._retained = collections.OrderedDict()  # micro batches of compiled graphs
        self._asked = None  # the change sent under the next id, without an answer so far
        self.backwards = 0  # of this session since the last step; the next step expects so many
        self.unsure = False  # the group may have gradients that `backwards` does not count
        self.lineage = None
        self.refresh()

    @classmethod
    def of(cls, client):
        """The client's session. The first call creates it."""
        if not hasattr(client, "_torch_session"):
            client._torch_session = cls(client)
        return client._torch_session

    def refresh(self):
        """Adopts the group's present state. Call it after a checkpoint was loaded or a call failed
        with STATE_LOST or GRADIENTS_LOST. Other sessions' gradients stay in the group; until
        `zero_grad` a step with `alone` is refused. Returns moed.TrainState."""
        state = self.client.train_state()
        if state.lineage == 0 and self.lineage:
            raise MoeError(grpc.StatusCode.UNAVAILABLE, "REFORMING",
                           "this worker has not joined the group's training yet: ask again later, "
                           "or connect to another worker")
        if state.lineage != self.lineage or state.backwards < self.backwards:
            self.backwards = 0  # their gradients are lost
        self.lineage, self.optimizer = state.lineage, state.optimizer
        self._step_id = state.last_step_id + 1
        self._asked = None
        self.unsure = state.backwards != self.backwards
        return state

    def next_batch(self):
        """An unused micro batch id of this session."""
        with self._lock:
            self._batch += 1
            return self._batch

    def add_retained(self, batch):
        """Records a forward pass of a compiled graph that the workers retain."""
        with self._lock:
            self._retained[batch] = None
            if len(self._retained) > _RETAINED:
                self._retained.popitem(last=False)

    def take_retained(self, batch):
        """True once per recorded pass: for its first backward pass."""
        with self._lock:
            return self._retained.pop(batch, self) is None

    def count(self, backwards):
        with self._lock:
            self.backwards += backwards

    def change(self, call, *arguments, **options):
        """Makes a change of the group (`call` is client.optimizer_step, client.save_checkpoint and
        so on) under the next id and the session's name. After a failure, repeat the same change: it
        is sent under the same id, so it runs at most once. Skips ids that another session has
        used."""
        asked = (call.__name__, arguments, sorted(options.items()))
        if self._asked not in (None, asked):
            self._step_id += 1  # a different change must not reuse the id
        for attempt in range(_IDS_TRIED):
            again = self._asked == asked
            try:
                answer = call(*arguments, step_id=self._step_id, session=self.name,
                              lineage=self.lineage, **options)
            except MoeError as error:
                # Another session has used the id; our change would have been recognised.
                if attempt < _IDS_TRIED - 1 and (error.reason == "ID_REUSED" or (
                        error.reason == "ID_TOO_OLD" and not again)):
                    self._step_id = max(self._step_id, self.client.train_state().last_step_id) + 1
                    continue
                if error.code.name in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    self._asked = asked  # the change may have run
                raise _with_advice(error)
            self._step_id += 1
            self._asked = None
            return answer


class _Pass(torch.autograd.Function):
    """One pass of at most max_tokens_per_step rows. `anchor` is a dummy that requires a gradient,
    so that backward is called even if x requires none."""

    @staticmethod
    def forward(ctx, x, anchor, module, token_ids):
        y, ids, ctx.version, ctx.batch = module._run_forward(x, token_ids)
        ctx.module = module
        ctx.save_for_backward(x, ids)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, ids = ctx.saved_tensors
        batch, ctx.batch = ctx.batch, None  # a second backward pass is a new micro batch
        return ctx.module._run_backward(dy, x, ids, ctx.version, batch), None, None, None


class RemoteMoE(torch.nn.Module):
    """One MoE layer of the served model: y = f(x), routed plus shared experts, without the
    residual. It has no local parameters; RemoteOptimizer moves those on the workers.

    layer              a moed.Layer, or its index in the model
    client             moed.Client
    session            Session; None: the client's
    retain             True: the worker retains x until backward, so x is sent once; from 256 tokens
                       on all workers retain gate and up too. If the worker has dropped x, backward
                       sends it again. False: x is sent twice
    input_only         True: backward computes the gradient of x only; the layer does not learn
    aux_coeff          coefficient of the load-balance loss; the workers add its gradient. With
                       "mean" it is K times transformers' router_aux_loss_coef for the same loss
    aux_convention     "mean", or "transformers" for that of transformers (Client.backward)
    model_digest       fail unless the group serves the model with this digest (Client); None: the
                       client's
    aux_loss           attribute: that loss times its coefficient, of the last backward

    state_dict() contains nothing of it, and it cannot be copied or pickled. A checkpoint of the
    group has its parameters (client/README.md, "A training that can be resumed").

    Under torch.compile a layer is one operator and breaks no graph (torch 2.4 or later). The
    attributes above then have the values of the moment of the call. Results, gradients and errors
    are the same.

    If x has more rows than info.max_tokens_per_step, or x and dy exceed info.max_message_bytes, the
    rows go in several passes of nearly equal length; each has a separate load-balance loss. Under
    torch.no_grad it is a plain forward pass, which a group that does not train serves too. A pass
    waits for a group that lacks a worker until the client's timeout is over. If another trainer
    moves the weights between forward and backward, backward fails with VERSION_MISMATCH.
    """

    def __reduce_ex__(self, protocol):
        """copy.deepcopy, pickle and torch.save call this."""
        raise TypeError(
            "a RemoteMoE cannot be copied or pickled: its parameters are on the workers. "
            "Save those with session.change(client.save_checkpoint, NAME), and the rest of "
            "the model with its state_dict(), which contains nothing of this layer")

    @renamed(save_for_backward="retain")
    def __init__(self, layer, client, session=None, retain=False, input_only=False,
                 aux_coeff=0.0, aux_convention="mean", model_digest=None):
        super().__init__()
        check_aux_convention(aux_convention)
        client.check_model(model_digest)
        if session is not None and session.client is not client:
            raise ValueError("the session belongs to another client")
        self.client = client
        self.layer = client.find_layer(layer)
        self._session = session
        if session is None and "training" in client.info.extensions:
            self._session = Session.of(client)
        self.retain = retain
        self.input_only = input_only
        self.aux_coeff = aux_coeff
        self.aux_convention = aux_convention
        self.aux_loss = 0.0
        self.model_digest = model_digest
        # Not on the meta device, where a model may be under construction.
        self._anchor = torch.zeros((), device="cpu", requires_grad=True)
        self._handle = _graph.enter(self)

    def forward(self, x, token_ids=None):
        """token_ids: integers of the shape x.shape[:-1], for a layer with routes_by_token_id."""
        if not isinstance(x, torch.Tensor):
            raise TypeError("x must be a tensor, not %s" % type(x).__name__)
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError("a remote layer accepts float32 or bfloat16, not %s" % x.dtype)
        if x.dim() == 0 or x.shape[-1] != self.layer.hidden:
            raise ValueError("x has shape %s; its last dimension must be %d"
                             % (tuple(x.shape), self.layer.hidden))
        rows = x.reshape(-1, self.layer.hidden)
        if token_ids is not None:
            if token_ids.shape != x.shape[:-1]:
                raise ValueError("token_ids has shape %s, expected %s"
                                 % (tuple(token_ids.shape), tuple(x.shape[:-1])))
            token_ids = token_ids.reshape(-1)
        if rows.shape[0] == 0:
            return x * 1
        if _graph.available and torch.compiler.is_compiling():
            return self._forward_in_graph(rows, token_ids).reshape(x.shape)
        if torch.is_grad_enabled():
            self._need_session()
            parts = [_Pass.apply(part, self._anchor, self, ids)
                     for part, ids in self._split_both(rows, token_ids, True)]
        else:
            parts = [self._run_plain(*both) for both in self._split_both(rows, token_ids, False)]
        return torch.cat(parts).reshape(x.shape)

    def _forward_in_graph(self, rows, token_ids):
        if torch.is_grad_enabled():
            return _graph.forward_training(rows, token_ids, self._anchor, self._handle,
                                           self.layer.top_k)[0]
        return _graph.forward(rows, token_ids, self._handle)

    def _run_plain(self, x, token_ids=None, **options):
        """y of one pass without gradients. `options`: of Client.forward."""
        return _to_torch(self.client.forward(self.layer, _to_numpy(x), patient=True,
                                             model_digest=self.model_digest, token_ids=token_ids,
                                             **options), x)

    def _run_experts(self, x, topk_ids, topk_weights):
        """The same of the routed experts alone, with this routing [T,K]."""
        return self._run_plain(x, topk_ids=topk_ids.to("cpu", torch.int32).numpy(),
                               topk_weights=topk_weights.detach().to("cpu", torch.float32).numpy(),
                               parts="routed")

    def _run_forward(self, x, token_ids):
        """One pass that may have a backward pass: (y, topk_ids, weights version, micro batch id or
        None if the worker does not retain it)."""
        session, retain = self.session, None
        if self.retain:
            retain = (session.name, session.next_batch())
        answer = session.client.forward(self.layer,
                                        _to_numpy(x),
                                        return_routing=True,
                                        retain=retain,
                                        patient=True,
                                        model_digest=self.model_digest,
                                        token_ids=token_ids)
        return (_to_torch(answer.y, x), torch.from_numpy(answer.topk_ids), answer.weights_version,
                retain[1] if retain and answer.retained else None)

    def _run_backward(self, dy, x, ids, version, batch):
        """dx of a pass. `batch` None: sends x."""
        session = self.session
        try:
            gradients = session.client.backward(
                self.layer, _to_numpy(dy.to(x.dtype)), _to_numpy(x), ids.numpy(),
                session=session.name, retained=batch is not None,
                micro_batch_id=session.next_batch() if batch is None else batch,
                weights_version=version, lineage=session.lineage,
                input_only=self.input_only, aux_coeff=self.aux_coeff,
                aux_convention=self.aux_convention)
        except BaseException as error:
            session.unsure = True
            raise _with_advice(error)
        self.aux_loss = gradients.aux_loss
        session.count(0 if self.input_only else 1)
        return _to_torch(gradients.dx, x)

    def _split(self, rows, gradients):
        """Splits rows into nearly equal parts within the server's limits; with `gradients` also
        within those of the backward pass, which has x and dy in one message."""
        info, layer = self.client.info, self.layer
        limit = (info.max_tokens_per_step
                 if gradients else info.max_tokens_per_request) or len(rows)
        width = layer.hidden * rows.element_size() * (2 if gradients else 1) + 8 * layer.top_k
        if layer.routes_by_token_id:
            width += 8
        if info.max_message_bytes:
            limit = min(limit, max((info.max_message_bytes - _MESSAGE_SLACK) // width, 1))
        return rows.tensor_split(-(-len(rows) // limit))

    def _split_both(self, rows, token_ids, gradients):
        """The same with the token ids [T] of each part, or None."""
        parts = self._split(rows, gradients)
        if token_ids is None:
            return [(part, None) for part in parts]
        return list(zip(parts, token_ids.split([len(part) for part in parts])))

    @property
    def session(self):
        """The Session. Raises MoeError with UNIMPLEMENTED if the group does not train."""
        if self._session is None:
            self._session = Session.of(self.client)
        return self._session

    def _need_session(self):
        try:
            return self.session
        except MoeError as error:
            if error.code != grpc.StatusCode.UNIMPLEMENTED:
                raise
            raise MoeError(error.code, error.reason, error.message +
                           ". A pass under torch.no_grad() needs no training") from None

    def extra_repr(self):
        return "layer=%d, hidden=%d, experts=%d, top_k=%d" % (
            self.layer.layer, self.layer.hidden, self.layer.experts, self.layer.top_k)


class RemoteOptimizer(torch.optim.Optimizer):
    """Moves the parameters of remote layers with the workers' optimizer. Use it as a torch
    optimizer: `step`, `zero_grad`, and param_groups[0] for schedulers.

    modules        RemoteMoE layers, all of one session
    lr, weight_decay, betas, eps, momentum
                   as in torch.optim.AdamW, or SGD with momentum (weight decay is decoupled)
    max_grad_norm  clips by the norm over all remote parameters; 0: never
    balance_rate   loss-free balancing: moves selection biases by this much; 0: never
    alone          True: this is the group's only trainer. A step fails with GRADIENTS_MISSING
                   unless the group has exactly the gradients of this session's backward calls.
                   Without a backward call it fails before it sends anything (torch's optimizers
                   would do nothing). False: a step uses all gradients in the group, from all
                   trainers
    last           attribute: moed.StepResult of the last step

    After a failed step, call `step` again: it repeats the change under the same id. After a failed
    backward, call `zero_grad` and repeat the whole step.
    """

    def __init__(self, modules, lr, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, momentum=0.0,
                 max_grad_norm=0.0, balance_rate=0.0, alone=True):
        modules = list(modules)
        for module in modules:
            if not isinstance(module, RemoteMoE):
                raise TypeError("RemoteOptimizer moves RemoteMoE layers, not %s; use torch's "
                                "optimizers for other modules" % type(module).__name__)
        if not lr >= 0:
            raise ValueError("lr must not be below 0: %r" % (lr,))
        if not all(0 <= beta < 1 for beta in betas) or len(betas) != 2:
            raise ValueError("betas must be two numbers from 0 to below 1: %r" % (betas,))
        if not eps > 0:
            raise ValueError("eps must be above 0 (a parameter that never had a gradient would "
                             "become 0 / 0): %r" % (eps,))
        for name, value, most in (("weight_decay", weight_decay, float("inf")),
                                  ("max_grad_norm", max_grad_norm, float("inf")),
                                  ("balance_rate", balance_rate, float("inf")),
                                  ("momentum", momentum, 1)):
            if not 0 <= value < most:
                raise ValueError("%s must be a number from 0%s: %r" % (
                    name, " to below 1" if most == 1 else "", value))
        if len({id(module.session) for module in modules}) != 1:
            raise ValueError("RemoteOptimizer needs RemoteMoE layers of one session")
        self.session = modules[0].session
        if momentum != 0 and self.session.optimizer == "adamw":
            raise ValueError("the workers' optimizer is adamw: it has betas, not momentum")
        if self.session.optimizer == "sgd" and (tuple(betas) != (0.9, 0.999) or eps != 1e-8):
            raise ValueError("the workers' optimizer is sgd: it has momentum, not betas and eps")
        self.alone = alone
        self.last = None
        super().__init__([module._anchor for module in modules], dict(
            lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, momentum=momentum,
            max_grad_norm=max_grad_norm, balance_rate=balance_rate))

    def add_param_group(self, param_group):
        if self.param_groups:  # super().__init__ adds the first
            raise ValueError("a RemoteOptimizer has one param group, because the workers have one "
                             "setting for all parameters")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None, grad_scale=1.0):
        """grad_scale multiplies all gradients first, for example 1 / n after n micro batches."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.alone and self.session.backwards == 0:  # expected_backwards=0 would mean any number
            raise MoeError(grpc.StatusCode.FAILED_PRECONDITION, "GRADIENTS_MISSING",
                           "this session made no backward call since its last step; no step was "
                           "sent")
        if grad_scale == 0:
            raise ValueError("grad_scale must not be 0; zero_grad clears gradients")
        group = self.param_groups[0]
        self.last = self.session.change(
            self.session.client.optimizer_step, float(group["lr"]),
            weight_decay=group["weight_decay"], betas=tuple(group["betas"]), eps=group["eps"],
            momentum=group["momentum"], max_grad_norm=group["max_grad_norm"],
            balance_rate=group["balance_rate"], grad_scale=grad_scale,
            expected_backwards=self.session.backwards if self.alone else 0)
        self.session.backwards = 0
        return loss

    def zero_grad(self, set_to_none=True):
        """Clears the gradients on the workers. Makes no call if there are none."""
        session = self.session
        if session.backwards != 0 or session.unsure or not self.alone:
            session.change(session.client.zero_grad)
            session.backwards, session.unsure = 0, False
