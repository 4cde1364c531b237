# SPDX-License-Identifier: Apache-2.0
"""Remote layers inside a compiled graph (torch.compile), as operators. Torch knows only the shapes
that an operator returns.

An operator takes tensors and plain numbers. So a number in a tensor identifies the layer, and one
graph serves all layers of a model. A tensor also carries facts of a forward pass to its backward
pass: `passes` [T, 2] int64 has each row's weights version and micro batch, -1 if the workers do not
retain the pass.
"""

import itertools
import typing
import weakref

import torch

_NOT_RETAINED = -1

_modules = weakref.WeakValueDictionary()
_numbers = itertools.count()

available = hasattr(torch.library, "custom_op")  # torch 2.4 and later


def enter(module):
    """A tensor with the number of `module`; the operators find the module by it while it lives."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor(number, device="cpu")


def _empty_ids(x, top_k):
    return torch.empty((x.shape[0], top_k), dtype=torch.int32, device="cpu")


if available:
    @torch.library.custom_op("moed::remote_moe", mutates_args=())
    def forward(x: torch.Tensor, token_ids: typing.Optional[torch.Tensor],
                handle: torch.Tensor) -> torch.Tensor:
        """A plain forward pass of x [T, H]; of a layer that routes by token id with the ids [T]."""
        module = _modules[handle.item()]
        return torch.cat([module._run_plain(*both)
                          for both in module._split_both(x, token_ids, False)])

    @forward.register_fake
    def _(x, token_ids, handle):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @torch.library.custom_op("moed::remote_experts", mutates_args=())
    def forward_experts(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
                        handle: torch.Tensor) -> torch.Tensor:
        """The routed experts of x [T, H], with given ids and weights [T, K]."""
        module = _modules[handle.item()]
        rows = [len(part) for part in module._split(x, False)]
        return torch.cat([module._run_experts(*part) for part in zip(
            x.split(rows), topk_ids.split(rows), topk_weights.split(rows))])

    @forward_experts.register_fake
    def _(x, topk_ids, topk_weights, handle):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def _no_backward(_ctx, _dy):
        raise RuntimeError("a backward pass through this remote layer: the group does not train, "
                           "or the client routes (moed.transformers: routing='client')")

    for _operator in (forward, forward_experts):
        _operator.register_autograd(_no_backward)

    @torch.library.custom_op("moed::remote_moe_training", mutates_args=())
    def forward_training(x: torch.Tensor, token_ids: typing.Optional[torch.Tensor],
                         anchor: torch.Tensor, handle: torch.Tensor, top_k: int
                         ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A pass that may have a backward pass: (y, topk_ids, passes)."""
        module = _modules[handle.item()]
        module._need_session()
        ys, ids, passes = [], [], []
        for part, part_ids in module._split_both(x, token_ids, True):
            y, topk_ids, version, batch = module._run_forward(part, part_ids)
            if batch is not None:
                module.session.add_retained(batch)
            ys.append(y)
            ids.append(topk_ids)
            passes.append(torch.tensor([version, _NOT_RETAINED if batch is None else batch]).expand(
                len(part), 2))
        return torch.cat(ys), torch.cat(ids), torch.cat(passes)

    @forward_training.register_fake
    def _(x, token_ids, anchor, handle, top_k):
        return (torch.empty(x.shape, dtype=x.dtype, device=x.device), _empty_ids(x, top_k),
                torch.empty((x.shape[0], 2), dtype=torch.int64, device="cpu"))

    @torch.library.custom_op("moed::remote_moe_backward", mutates_args=())
    def backward(dy: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, passes: torch.Tensor,
                 anchor: torch.Tensor, handle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(dx, gradient of the anchor). The second is 0. A graph that needs only the second still
        makes the call, so that the workers' parameters get gradients."""
        module = _modules[handle.item()]
        parts, first = [], 0
        for part in module._split(x, True):
            rows = slice(first, first + len(part))
            version, batch = passes[first].tolist()
            # A second backward pass of the same graph is a new micro batch.
            retained = batch != _NOT_RETAINED and module.session.take_retained(batch)
            parts.append(module._run_backward(dy[rows], part, ids[rows], version,
                                              batch if retained else None))
            first += len(part)
        return torch.cat(parts), torch.zeros_like(anchor)

    @backward.register_fake
    def _(dy, x, ids, passes, anchor, handle):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(anchor)

    def _setup_context(ctx, inputs, output):
        x, _, anchor, handle, _ = inputs
        ctx.save_for_backward(x, output[1], output[2], anchor, handle)

    def _backward(ctx, dy, _ids, _passes):
        dx, danchor = backward(dy, *ctx.saved_tensors)
        return dx, None, danchor, None, None

    forward_training.register_autograd(_backward, setup_context=_setup_context)
