# SPDX-License-Identifier: Apache-2.0
"""Answers of calls: frozen records. Read their fields by name; a record is not a tuple."""

import dataclasses
from typing import Optional

import numpy as np

from ._renamed import renamed_fields

# Records that hold arrays compare by identity: an array has no single truth value.
_record = dataclasses.dataclass(frozen=True)
_record_of_arrays = dataclasses.dataclass(frozen=True, eq=False)


@_record
class Layer:
    """One MoE layer of the model.

    layer                index in the model; Client.forward takes it
    hidden               H, width of x and y
    experts              E, routed experts
    top_k                K, experts per token
    intermediate         inner width of one expert
    zero_experts         identity experts with ids E ... E + zero_experts - 1
    shared_intermediate  inner width of the shared expert; 0: there is none
    routes_by_token_id   a table of the model chooses by token id: calls give token_ids or topk_ids
    vocabulary           with it, rows of that table: token ids are below it; else 0
    """

    layer: int
    hidden: int
    experts: int
    top_k: int
    intermediate: int
    zero_experts: int
    shared_intermediate: int
    routes_by_token_id: bool = False
    vocabulary: int = 0


@_record
class ServerInfo:
    """The server and its model, at the time of connecting.

    model_digest       digest of the weights in the model's files; "" before the group has formed
    training_endpoint  the address for trainers, if the worker has a separate one; else ""
    models             names of the models that the worker serves, the default model first
    """

    model: str
    family: str
    version: str
    backend: str
    coordinator: str
    workers: tuple
    epoch: int
    weights_version: int
    max_message_bytes: int
    max_tokens_per_request: int
    max_tokens_per_step: int
    extensions: tuple
    model_digest: str = ""
    training_endpoint: str = ""
    models: tuple = ()


@renamed_fields(saved="retained", saved_activations="retained_activations")
@_record_of_arrays
class ForwardResult:
    """Answer of Client.forward with return_routing or return_rehomed, or with
    on_unavailable="partial".

    y                     [T,H], kind and dtype of x
    topk_ids              [T,K] int32, in the router's order; None without return_routing
    topk_weights          [T,K] float32; the same
    epoch                 of the view that computed it
    weights_version       version of the weights
    stages                dict: nanoseconds on the server by stage ("queue_ns", ...,
                          "server_ns"), and "step_tokens", "steps"
    retained              the worker has retained the pass for Client.backward
    retained_activations  and its device retains gate and up, as long as it has room
    available             [T] bool, with on_unavailable="partial": False where an expert of the
                          token has no copy now; its row of y is zeros. None otherwise
    rehomed_experts       tuple of ids, ascending, with return_rehomed: experts of the whole layer
                          that have lost a copy and have another one, in the view and with the
                          placement of the last step. None without
    """

    y: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    epoch: int
    weights_version: int
    stages: dict
    retained: bool = False
    retained_activations: bool = False
    available: np.ndarray = None
    rehomed_experts: Optional[tuple] = None


@_record
class RegionAnswer:
    """RegionRequest.answer, StreamRequest.result: how a request through shared memory was computed.

    epoch, weights_version  as in ForwardResult
    stages  dict: "queue_ns" (until its first step began), "step_ns" (its last step) and
            "server_ns" (all), in nanoseconds on the worker; "step_tokens" and "steps"

    If y is on a GPU, the worker reports them after the end. All are 0 if they do not come within
    100 ms, as when the worker ends meanwhile.
    """

    epoch: int
    weights_version: int
    stages: dict

    @classmethod
    def of(cls, outcome):
        """Of an outcome of moed._native."""
        _, epoch, version, stages = outcome
        names = ("queue_ns", "step_ns", "server_ns", "step_tokens", "steps")
        return cls(epoch, version, dict(zip(names, stages)))


@renamed_fields(used_saved="used_retained")
@_record_of_arrays
class Gradients:
    """Answer of Client.backward.

    dx                [T,H] gradient of x, dtype of dy
    weight_gradients  [T,K] float32 gradient of each routing weight; None: not asked for
    aux_loss          the load-balance loss; 0.0: none
    epoch             of the view that computed it
    weights_version   version of the weights
    lineage           see TrainState
    repeated          the answer is that of an earlier call
    used_retained     x and routing came from a forward pass that the worker had retained
    stages            as in ForwardResult
    used_activations  with used_retained: the worker's device still had gate and up of that pass
    """

    dx: np.ndarray
    weight_gradients: Optional[np.ndarray]
    aux_loss: float
    epoch: int
    weights_version: int
    lineage: int
    repeated: bool
    used_retained: bool
    stages: dict
    used_activations: bool


@_record
class StepResult:
    """Answer of Client.optimizer_step.

    weights_version    of the weights from now on; a skipped step does not change it
    lineage            see TrainState
    skipped_nonfinite  a gradient was NaN or infinite: no parameter moved, gradients are zero
    grad_norm          of all gradients, after grad_scale and before clipping
    backwards          Backward calls that contributed gradients
    steps              optimizer steps that moved parameters, since the beginning
    repeated           the answer is that of an earlier call
    """

    weights_version: int
    lineage: int
    skipped_nonfinite: bool
    grad_norm: float
    backwards: int
    steps: int
    repeated: bool


@_record
class Checkpoint:
    """Answer of save_checkpoint, load_checkpoint and export_adapter. A field that the call does not
    report is 0.

    weights_version  of the saved weights; after loading: the new one
    bytes            written by all workers
    lineage          of the saved state; after loading: the new one
    repeated         the answer is that of an earlier call
    removed          names of checkpoints that `keep` removed, newest first, 32 at most. A repeated
                     answer has none, unless the Save was still running when the call came
    steps            save, load: optimizer steps in the checkpoint
    lost_steps       load: unsaved steps that were discarded
    lost_backwards   load: Backward calls that lost their gradients
    """

    weights_version: int
    bytes: int
    lineage: int
    repeated: bool
    removed: tuple = ()
    steps: int = 0
    lost_steps: int = 0
    lost_backwards: int = 0


@renamed_fields(saved_bytes="retained_bytes", saved_bytes_limit="retained_bytes_limit",
                saved_device_bytes="retained_device_bytes",
                saved_device_bytes_limit="retained_device_bytes_limit")
@_record
class TrainState:
    """The state of training, as the worker that answers knows it.

    lineage           number of the weights' history. A group begins with a random number; it
                      increases when the group loads a checkpoint or goes back to one. 0: the worker
                      that answers has not joined the group's training yet
    weights_version   1 after loading the model
    steps             optimizer steps that moved parameters
    backwards         Backward calls since the last step
    last_step_id      the highest step_id that ran or runs
    optimizer         "adamw" or "sgd"
    frozen            frozenset of "router", "experts", "shared"
    lora_rank         r of the adapters; 0: full training
    lora_scale        alpha / r
    lora_targets      tuple of "gate", "up", "down"
    checkpoint        last saved or loaded; "": none
    state_bytes       of gradients and optimizer state on this worker
    retained_bytes    of retained forward passes on this worker; retained_bytes_limit is their limit
    saving, loading   checkpoint that is written, or checked before it is loaded; "": none
    problem           why the group could not go back to its checkpoint and does not serve; "": none
    unsaved_steps     optimizer steps since the state of `checkpoint`, or since the model was loaded
    retained_device_bytes  of activations that this worker's device retains for Backward;
                      retained_device_bytes_limit is their limit
    progress_bytes    bytes of `saving` or `loading` that this worker has written or checked;
                      progress_bytes_total is their sum, 0: not known
    lost_micro_batches
                      tuple of (session, id): Backward calls to send again after GRADIENTS_LOST;
                      1024 at most, and 256 of a session. If lost_backwards, the number of all, is
                      more: send all since the last step again, under new ids
    """

    lineage: int
    weights_version: int
    steps: int
    backwards: int
    last_step_id: int
    optimizer: str
    frozen: frozenset
    lora_rank: int
    lora_scale: float
    lora_targets: tuple
    checkpoint: str
    state_bytes: int
    retained_bytes: int
    retained_bytes_limit: int
    saving: str
    loading: str
    problem: str
    unsaved_steps: int
    retained_device_bytes: int
    retained_device_bytes_limit: int
    progress_bytes: int
    progress_bytes_total: int
    lost_micro_batches: tuple
    lost_backwards: int


@_record
class CheckpointInfo:
    """One entry of list_checkpoints, from its manifest and the names of its files.

    name             load_checkpoint takes it
    problem          why these workers cannot load it (damaged, made with other settings, no
                     checkpoint at all); "": none known. Only a load checks the hashes
    readable         the manifest is complete; otherwise all fields below are 0 or empty
    steps            optimizer steps that moved parameters
    weights_version, lineage
                     of the state in it
    parent           the checkpoint before it in its training; "": none
    made_s           seconds since 1970 by the clock of the host that wrote it; 0: not known
    bytes            of its files
    optimizer        "adamw" or "sgd"; None: not known
    frozen, lora_rank, lora_targets
                     as in TrainState
    lora_alpha       as --lora-alpha
    """

    name: str
    problem: str
    readable: bool
    steps: int
    weights_version: int
    lineage: int
    parent: str
    made_s: int
    bytes: int
    optimizer: Optional[str]
    frozen: frozenset
    lora_rank: int
    lora_alpha: float
    lora_targets: tuple
