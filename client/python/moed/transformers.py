# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers (5) without their experts. Import it separately; it needs
torch and transformers:

    import moed, moed.transformers

    client = moed.Client("127.0.0.1:7600")
    model = moed.transformers.load("/models/olmoe", client)     # reads no weights of experts
    model.generate(...)

`load` builds a model, `patch` changes one that is loaded and frees its experts. `routing` tells who
routes:

"server"  (default) A request has hidden states, and token ids for DeepSeek-V4's first layers. The
          group routes, and computes the routed and the shared experts. The layers are RemoteMoE:
          where the group trains, they learn (`layers` lists them, for RemoteOptimizer).
"client"  A request has ids and weights too. transformers' module routes and computes the shared
          experts; the group computes the routed ones. This uses transformers' registry of experts
          (experts_implementation="moed"), so modules of models that are not in the table below
          work with it, if their class has that interface. For inference: a backward pass is
          refused. Llama 4 and LongCat have no such interface, and experts in a latent space
          (Nemotron-3-Super) need "server".

Importing this module registers "moed", so transformers accepts it too; then give the model to
`patch`, because a module does not know its layer:

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moed")
    moed.transformers.patch(model, client, routing="client")

Both ways work with generate(), several threads, torch.compile (one operator for a layer) and
gradient checkpointing. A model without its experts cannot be saved: save_pretrained and push_to_hub
are refused.
output_router_logits works: the routers stay local too, as they were in the files, and run when
their logits are wanted. They have no gradient. In training, use `aux_coeff` of RemoteMoE instead.
"""

import collections
import re

import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from . import _graph
from ._client import Client
from .torch import RemoteMoE

__all__ = ["layers", "load", "patch"]

# How transformers builds the MoE block of a family. `router`: the block's attribute.
# `returns_tuple`: the decoder layer takes the first of it. `bias`: the block's buffer that its
# router takes as a second argument, or None.
_Block = collections.namedtuple("_Block", "family router returns_tuple bias",
                                defaults=(False, None))

_BLOCKS = {
    "BailingHybridMoE": _Block("bailing_hybrid", "gate"),
    "DeepseekV2Moe": _Block("deepseek_v2", "gate"),
    "DeepseekV32MoE": _Block("deepseek_v32", "gate"),
    "DeepseekV3MoE": _Block("deepseek_v3", "gate"),
    "DeepseekV4SparseMoeBlock": _Block("deepseek_v4", "gate"),
    "Dots1MoE": _Block("dots1", "gate"),
    "Ernie4_5_MoeSparseMoeBlock": _Block("ernie4_5_moe", "gate"),
    "Glm4MoeLiteMoE": _Block("glm4_moe_lite", "gate"),
    "Glm4MoeMoE": _Block("glm4_moe", "gate"),
    "GlmMoeDsaMoE": _Block("glm_moe_dsa", "gate"),
    "GptOssMLP": _Block("gpt_oss", "router", True),
    "GraniteMoeHybridMoE": _Block("granitemoehybrid", "router"),
    "GraniteMoeMoE": _Block("granitemoe", "router"),
    "GraniteMoeSharedMoE": _Block("granitemoeshared", "router"),
    "HunYuanMoEV1Moe": _Block("hunyuan_v1_moe", "gate"),
    "JambaSparseMoeBlock": _Block("jamba", "router"),
    "KimiLinearMoE": _Block("kimi_linear", "gate"),
    "Lfm2MoeSparseMoeBlock": _Block("lfm2_moe", "gate", False, "expert_bias"),
    "Llama4TextMoe": _Block("llama4_text", "router", True),
    "LongcatFlashMoE": _Block("longcat_flash", "router"),
    "MiMoV2FlashMoE": _Block("mimo_v2_flash", "gate"),
    "MiniMaxM2SparseMoeBlock": _Block("minimax_m2", "gate", False, "e_score_correction_bias"),
    "MiniMaxM3VLSparseMoeBlock": _Block("minimax_m3_vl", "gate"),
    "MiniMaxSparseMoeBlock": _Block("minimax", "gate"),
    "Mistral4MoE": _Block("mistral4", "gate"),
    "MistralLarge4TextMoE": _Block("mistral_large4", "gate"),
    "MixtralSparseMoeBlock": _Block("mixtral", "gate"),
    "NemotronHMoE": _Block("nemotron_h", "gate"),
    "OlmoeSparseMoeBlock": _Block("olmoe", "gate"),
    "PhimoeSparseMoeBlock": _Block("phimoe", "router"),
    "Qwen2MoeSparseMoeBlock": _Block("qwen2_moe", "gate"),
    "Qwen3MoeSparseMoeBlock": _Block("qwen3_moe", "gate"),
    "Qwen3NextSparseMoeBlock": _Block("qwen3_next", "gate"),
    "Qwen3OmniMoeThinkerTextSparseMoeBlock": _Block("qwen3_omni_moe", "gate"),
    "Qwen3VLMoeTextSparseMoeBlock": _Block("qwen3_vl_moe", "gate"),
    "Qwen3_5MoeSparseMoeBlock": _Block("qwen3_5_moe", "gate"),
}

_PLACE = re.compile(r"(?:^|\.)layers\.(\d+)\.\w+$")
_ROUTINGS = ("server", "client")

# Found: an MoE block of a model. `kind`: _Block, or None if only routing="client" can serve it.
_Found = collections.namedtuple("_Found", "name parent attribute module layer kind")


class RemoteBlock(torch.nn.Module):
    """In place of a decoder layer's MoE block. It keeps the block's router for
    output_router_logits, under its name, so checkpoints fit.

    moe  attribute: the RemoteMoE
    """

    def __init__(self, block, kind, moe):
        super().__init__()
        self.moe = moe
        self._kind = kind
        self.add_module(kind.router, getattr(block, kind.router).requires_grad_(False))
        if kind.bias is not None:
            self.register_buffer(kind.bias, getattr(block, kind.bias))

    def forward(self, hidden_states, input_ids=None):
        """input_ids: DeepSeek-V4 gives them to every layer, and its first layers route by them."""
        token_ids = input_ids if self.moe.layer.routes_by_token_id else None
        router = getattr(self, self._kind.router)
        if router._forward_hooks:  # transformers adds one when it first collects router logits
            more = () if self._kind.bias is None else (getattr(self, self._kind.bias),)
            if token_ids is not None:
                more = (token_ids,)
            with torch.no_grad():
                router(hidden_states.reshape(-1, hidden_states.shape[-1]), *more)
        if torch.is_grad_enabled() and "training" not in self.moe.client.info.extensions:
            y = _graph.forward(hidden_states.reshape(-1, self.moe.layer.hidden),
                               None if token_ids is None else token_ids.reshape(-1),
                               self.moe._handle).reshape(hidden_states.shape)
        else:
            y = self.moe(hidden_states, token_ids)
        return (y, None) if self._kind.returns_tuple else y


def _experts_forward(self, hidden_states, top_k_index, top_k_weights):
    """experts_implementation="moed". `self` is a module of experts."""
    moe = getattr(self, "_moed", None)
    if moe is None:
        raise RuntimeError(
            "experts_implementation='moed': this module does not know its group and layer; call "
            "moed.transformers.patch(model, client, routing='client') first")
    return _graph.forward_experts(hidden_states, top_k_index, top_k_weights, moe._handle)


ALL_EXPERTS_FUNCTIONS.register("moed", _experts_forward)


def _has_interface(experts):
    """Whether the class looks its function up in transformers' registry. The decorator
    @use_experts_implementation gives its modules this attribute."""
    return hasattr(experts, "is_transposed")


def _find(model, routing):
    found = []
    for name, module in list(model.named_modules()):
        place = _PLACE.search(name)
        kind = _BLOCKS.get(type(module).__name__)
        experts = getattr(module, "experts", None)
        if place is None or isinstance(module, RemoteBlock) or not isinstance(
                experts, torch.nn.Module):
            continue
        if name.startswith("talker."):  # of Qwen-Omni: the group has the thinker's experts
            continue
        if kind is None and not (routing == "client" and _has_interface(experts)):
            raise ValueError(
                "%s of family %s is no MoE block that moed.transformers knows; it knows %s" % (
                    type(module).__name__, model.config.model_type,
                    ", ".join(sorted(block.family for block in _BLOCKS.values()))))
        if routing == "client" and not _has_interface(experts):
            raise ValueError(
                "family %s has no experts interface in transformers (%s), so it cannot be served "
                "with routing='client'; use routing='server'" % (
                    model.config.model_type, type(experts).__name__))
        parent, attribute = name.rsplit(".", 1)
        found.append(_Found(name, model.get_submodule(parent), attribute, module, int(place[1]),
                            kind))
    if not found:
        remote = any(isinstance(m, RemoteBlock) or hasattr(m, "_moed") for m in model.modules())
        raise ValueError("this model's experts are remote already" if remote else
                         "family %s: this model has no MoE block" % model.config.model_type)
    return found


def _shared_width(block):
    """Inner width of the block's shared experts; 0 without any."""
    for name in ("shared_expert", "shared_experts", "shared_mlp"):
        shared = getattr(block, name, None)
        if shared is not None:
            return shared.down_proj.weight.shape[1]
    return 0


def _experts_of(block):
    """Number of the block's experts, without LongCat's zero experts."""
    experts = block.experts
    return getattr(experts, "num_routed_experts", None) or experts.num_experts


def _latent(config):
    """Width of the latent space of Nemotron's experts, or None."""
    return getattr(config, "moe_latent_size", None)


def _differences(found, client, whole):
    """Texts of what the group's model does not have in common with this one. `whole`: the
    configuration of the whole model, of which the text model is one part."""
    config = whole.get_text_config()
    ours, theirs = [each.layer for each in found], [each.layer for each in client.layers]
    if ours != theirs:
        return ["the model has %d MoE layers (%s), and the group %d (%s)" % (
            len(ours), ", ".join(map(str, ours)), len(theirs), ", ".join(map(str, theirs)))]
    texts = []
    family = found[0].kind.family if found[0].kind is not None else config.model_type
    if client.info.family not in (family, whole.model_type, config.model_type):
        texts.append("the model's family is %s, and the group's %s" % (family, client.info.family))
    for each in found:
        layer, block = client.layer(each.layer), each.module
        experts, hidden = _experts_of(block), config.hidden_size
        inner = block.experts.down_proj.numel() // (experts * (_latent(config) or hidden))
        router = getattr(block, each.kind.router) if each.kind is not None else block
        for what, mine, its in (
                ("hidden size", hidden, layer.hidden), ("experts", experts, layer.experts),
                ("experts per token", getattr(router, "top_k", layer.top_k), layer.top_k),
                ("inner width", inner, layer.intermediate),
                ("inner width of shared experts", _shared_width(block),
                 layer.shared_intermediate),
                ("routing by token id", getattr(block, "is_hash", False),
                 layer.routes_by_token_id)):
            if mine != its:
                texts.append("layer %d: %s is %d in the model, and %d in the group" % (
                    each.layer, what, mine, its))
    return texts


def _make_remote(model, client, routing, model_digest, remote):
    """Replaces the blocks of `model`, or the weights of their experts. Changes nothing on an
    error."""
    if routing not in _ROUTINGS:
        raise ValueError("routing is 'server' or 'client', not %r" % (routing,))
    found = _find(model, routing)
    differences = _differences(found, client, model.config)
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("the model's dtype is %s; remote layers accept float32 or bfloat16"
                         % model.dtype)
    if routing == "client" and _latent(model.config.get_text_config()):
        raise ValueError("the experts of this model are in a latent space, so it cannot be served "
                         "with routing='client'; use routing='server'")
    if differences:
        raise ValueError("the group at %s serves another model: %s" % (
            client.info.workers[0] if client.info.workers else "?", "; ".join(differences)))
    digest = model_digest or client.info.model_digest or None
    moes = [RemoteMoE(each.layer, client, model_digest=digest, **remote) for each in found]
    for each, moe in zip(found, moes):
        if routing == "server":
            block = RemoteBlock(each.module, each.kind, moe)
            setattr(each.parent, each.attribute, block.train(each.module.training))
        else:
            experts = each.module.experts
            for name in list(experts._parameters):
                del experts._parameters[name]
            # There is nothing to initialise; Qwen-Omni's block would do it for its experts.
            experts._is_hf_initialized = each.module._is_hf_initialized = True
            experts._moed = moe
    if routing == "client":
        model.set_experts_implementation("moed")


def _check_client(client):
    if not isinstance(client, Client):
        raise TypeError("client is a moed.Client, not %r" % (client,))


def _refuse_to_save(*_arguments, **_options):
    raise ValueError(
        "the saved model would be one without its experts, which the group has. Save the "
        "group's weights with session.change(client.save_checkpoint, NAME) (a whole model folder), "
        "and the rest of this model with torch.save(model.state_dict(), PATH)")


def patch(model, client, *, routing="server", model_digest=None, **remote):
    """Makes the MoE layers of a loaded model remote, and frees the local ones. Returns `model`.

    model         a transformers model, whole or a base model, float32 or bfloat16
    client        moed.Client of a group that serves the same model
    routing       "server" or "client", as above
    model_digest  fail unless the group serves the model with this digest (`moectl status`), now and
                  at each pass. None: the model that the client found when it connected
    remote        options of RemoteMoE: session, retain, input_only, aux_coeff, aux_convention

    Raises ValueError, with all differences, unless family, layers, widths, experts and top-k are
    those of the group; for a family that is not known or has no experts interface; for a model
    that is remote already. Raises MoeError (MODEL_MISMATCH) for another digest. The model is then
    unchanged. Equal shapes do not show that two models have the same weights; a digest does.
    """
    _check_client(client)
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError("model is a model of transformers, not a %s" % type(model).__name__)
    _make_remote(model, client, routing, model_digest, remote)
    model.save_pretrained = model.push_to_hub = _refuse_to_save
    return model


def load(name_or_path, client, *, routing="server", model_digest=None, model_class=None,
         remote=None, **options):
    """Builds a transformers model without its experts, which the group has. Their weights are never
    read, and have no memory here. Returns the model, in eval mode.

    name_or_path  as in from_pretrained
    model_class   None: the class that config.json names in `architectures`
    remote        dict of the options of RemoteMoE
    options       of from_pretrained: dtype, device_map, attn_implementation and so on
    client, routing, model_digest
                  as in `patch`, and so are the errors. They come before any weights are read
    """
    _check_client(client)
    config = options.pop("config", None) or transformers.AutoConfig.from_pretrained(
        name_or_path, **{key: options[key] for key in (
            "cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
            if key in options})
    if model_class is None:
        names = config.architectures or []
        model_class = getattr(transformers, names[0], None) if names else None
        if model_class is None:
            raise ValueError("transformers has no class for the architectures %s of %s; give "
                             "model_class" % (names, name_or_path))
    elif not (isinstance(model_class, type)
              and issubclass(model_class, transformers.PreTrainedModel)):
        raise TypeError("model_class is a class of models, such as MixtralForCausalLM, not %s"
                        % getattr(model_class, "__name__", model_class))

    def __init__(self, *arguments, **keywords):
        model_class.__init__(self, *arguments, **keywords)
        _make_remote(self, client, routing, model_digest, remote or {})

    # Files have the experts under several names, below the block or, of Mistral, below the layer.
    blocks = "mlp|feed_forward|block_sparse_moe|mixer|experts|shared_experts|gate"
    ignored = {r"layers\.%d\.(%s)\." % (each.layer, blocks) for each in client.layers}
    ignored.update(model_class._keys_to_ignore_on_load_unexpected or ())
    building = type(model_class.__name__, (model_class,), {
        "__init__": __init__, "__module__": model_class.__module__,
        "_keys_to_ignore_on_load_unexpected": list(ignored)})
    if routing == "client":
        options["experts_implementation"] = "moed"
    loaded = building.from_pretrained(name_or_path, config=config, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.__class__ = model_class
    model.save_pretrained = model.push_to_hub = _refuse_to_save
    return loaded


def layers(model):
    """The RemoteMoE layers of a model, ascending; of a model with routing="server" they learn."""
    return [module for module in model.modules() if isinstance(module, RemoteMoE)]
