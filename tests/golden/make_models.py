#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes golden models with transformers and torch: the families of 2025 and 2026.

    tests/golden/make_models.py tests/golden/models [FAMILY ...]
    tests/golden/make_models.py tests/golden/uncommon [FAMILY ...]

Each is a small model of transformers' class with random weights, written by save_pretrained in
bf16 and read again in float32. transformers' own MoE blocks then compute outputs and gradients.
README.md in the folder of models says what the files hold."""

import os
import sys

import numpy as np
import safetensors.numpy
import torch
import transformers

H, E, VOCAB = 32, 8, 64
TEXT = {"hidden_size": H, "vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
LATENT = {**TEXT, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
          "linear_num_value_heads": 2}
# DeepSeek-V3's block, one dense layer before it.
DEEPSEEK = {"intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 16,
            "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}
UNGROUPED = {**DEEPSEEK, "n_routed_experts": E, "num_experts_per_tok": 3, "n_group": 1,
             "topk_group": 1}
QWEN = {"moe_intermediate_size": 24, "num_experts": E, "num_experts_per_tok": 3,
        "intermediate_size": 48, "num_hidden_layers": 1}
NEMOTRON = {**TEXT, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "intermediate_size": 48, "n_routed_experts": E, "n_shared_experts": 1,
            "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 2.5, "ssm_state_size": 8, "mamba_num_heads": 4,
            "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16}
del NEMOTRON["num_hidden_layers"]
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
          "out_hidden_size": H, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


def omni():
    """Qwen3-Omni: three models in one, of which the thinker's text model is served."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**TEXT, **QWEN, "rope_parameters": rope}
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB}
    return {
        "thinker_config": {
            "text_config": text, "audio_token_id": 60, "image_token_id": 61, "video_token_id": 62,
            "vision_start_token_id": 63,
            "vision_config": VISION,
            "audio_config": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2,
                             "encoder_ffn_dim": 16, "output_dim": H, "num_mel_bins": 8,
                             "max_source_positions": 16, "downsample_hidden_size": 8}},
        "talker_config": {
            "text_config": {**small, "moe_intermediate_size": 8, "num_experts": 2,
                            "num_experts_per_tok": 1, "shared_expert_intermediate_size": 8,
                            "head_dim": 8, "rope_parameters": rope},
            "code_predictor_config": {**small, "head_dim": 8, "num_code_groups": 2},
            "thinker_hidden_size": H, "num_code_groups": 2, "spatial_merge_size": 2},
        "code2wav_config": {**small, "codebook_size": 8, "num_quantizers": 2, "decoder_dim": 16,
                            "upsample_rates": [2], "upsampling_ratios": [2]},
    }


# family: (class, settings)
MODELS = {
    "minimax": ("MiniMaxForCausalLM", {
        **TEXT, "intermediate_size": 24, "num_local_experts": E, "num_experts_per_tok": 2,
        "num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration", {
        "text_config": {
            **TEXT, "intermediate_size": 24, "dense_intermediate_size": 48,
            "shared_intermediate_size": 40, "num_local_experts": E, "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.0, "rotary_dim": 8, "swiglu_limit": 1.0,
            "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        "projector_hidden_size": H}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {
        "text_config": {**TEXT, **QWEN, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        "vision_config": VISION}),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", {
        "text_config": {**TEXT, **QWEN, **LINEAR, "shared_expert_intermediate_size": 40,
                        "layer_types": ["full_attention"], "rope_parameters": {
                            "rope_type": "default", "rope_theta": 1e4,
                            "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}},
        "vision_config": VISION}),
    "qwen3_omni_moe": ("Qwen3OmniMoeForConditionalGeneration", omni()),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {**INDEXED, **DEEPSEEK}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", {
        **TEXT, "moe_intermediate_size": 24, "n_routed_experts": E, "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5, "swiglu_limit": 1.0, "mlp_layer_types": ["moe", "moe"],
        "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "head_dim": 16,
        "num_key_value_heads": 1, "hc_mult": 2, "index_n_heads": 2, "index_head_dim": 8,
        "index_topk": 8, "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 64}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {
        **LATENT, **UNGROUPED, "mlp_layer_types": ["dense", "sparse"]}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {**INDEXED, **UNGROUPED}),
    "dots1": ("Dots1ForCausalLM", {**TEXT, **UNGROUPED, "n_shared_experts": 2}),
    "bailing_hybrid": ("BailingHybridForCausalLM", {
        **LATENT, **DEEPSEEK, "num_local_experts": 16,
        "layer_types": ["full_attention", "full_attention"]}),
    "kimi_linear": ("KimiLinearForCausalLM", {
        **LATENT, **UNGROUPED, "num_local_experts": E, "linear_head_dim": 8,
        "linear_num_heads": 2, "layer_types": ["linear_attention", "full_attention"]}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {
        **TEXT, **{k: v for k, v in UNGROUPED.items() if k != "n_shared_experts"},
        "v_head_dim": 8, "routed_scaling_factor": 1.0,
        "layer_types": ["full_attention", "full_attention"]}),
    "mistral4": ("Mistral4ForCausalLM", {**LATENT, **DEEPSEEK, "first_k_dense_replace": 1}),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", {
        "text_config": {**INDEXED, **DEEPSEEK},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
                          "head_dim": 8}}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {
        **TEXT, **QWEN, "num_hidden_layers": 2, "num_dense_layers": 1,
        "routed_scaling_factor": 1.5, "layer_types": ["conv", "full_attention"]}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {
        **TEXT, "intermediate_size": 24, "num_experts": E, "moe_topk": [3],
        "num_hidden_layers": 1}),
    "jamba": ("JambaForCausalLM", {
        **TEXT, "intermediate_size": 24, "num_experts": E, "num_experts_per_tok": 2,
        "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
        "mamba_d_state": 4, "mamba_dt_rank": 4}),
    "granitemoe": ("GraniteMoeForCausalLM", {
        **TEXT, "intermediate_size": 24, "num_local_experts": E, "num_experts_per_tok": 3,
        "num_hidden_layers": 1}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {
        **TEXT, "intermediate_size": 24, "num_local_experts": E, "num_experts_per_tok": 3,
        "num_hidden_layers": 1, "shared_intermediate_size": 40,
        "layer_types": ["full_attention"], "mamba_n_heads": 4, "mamba_d_state": 4}),
    "longcat_flash": ("LongcatFlashForCausalLM", {
        **LATENT, "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24,
        "n_routed_experts": E, "zero_expert_num": 4, "moe_topk": 4,
        "routed_scaling_factor": 6.0}),
}

# These do not train: tests/golden/uncommon.
UNCOMMON = {
    "nemotron_h": ("NemotronHForCausalLM", {**NEMOTRON, "num_experts_per_tok": 3}),
    "nemotron_h_latent": ("NemotronHForCausalLM", {
        **NEMOTRON, "n_routed_experts": 40, "num_experts_per_tok": 22, "moe_latent_size": 16}),
    "phimoe": ("PhimoeForCausalLM", {
        **TEXT, "intermediate_size": 24, "num_local_experts": E, "num_experts_per_tok": 2,
        "num_hidden_layers": 1, "router_jitter_noise": 0.2}),
}


def make(name):
    """The model, with weights that give logits, gates and biases of ordinary sizes."""
    class_name, settings = {**MODELS, **UNCOMMON}[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(sum(map(ord, name)))
    model = model_class(model_class.config_class(**settings))
    with torch.no_grad():
        for path, p in list(model.named_parameters()) + list(model.named_buffers()):
            if path.endswith(("e_score_correction_bias", "expert_bias")):
                p.normal_(0, 0.1)
            elif p.dim() >= 2 and p.is_floating_point():
                p.normal_(0, p.shape[-1] ** -0.5)
    for p in model.parameters():
        assert torch.isfinite(p).all(), name
    return model.to(torch.bfloat16)


def blocks(model):
    """(number of the layer, path, block) of the MoE blocks of the language model."""
    for path, module in model.named_modules():
        parts = path.split(".")
        if isinstance(getattr(module, "experts", None), torch.nn.Module) and "layers" in parts \
                and "talker" not in parts:
            yield int(parts[parts.index("layers") + 1]), path, module


def record(model):
    """golden.safetensors: tensors and metadata."""
    found, out = list(blocks(model)), {}
    meta = {"transformers": transformers.__version__, "torch": torch.__version__}
    for layer, path, block in found:
        meta["layer%d" % layer] = "%s %s" % (path, type(block).__name__)
        for tokens in (1, 37):
            x = torch.randn(1, tokens, H).bfloat16().float().requires_grad_()
            dy = torch.randn(1, tokens, H).bfloat16().float()
            block.zero_grad()
            y = block(x)
            y = y[0] if isinstance(y, tuple) else y
            y.backward(dy)
            for what, value in (("x", x), ("y", y), ("dy", dy), ("dx", x.grad)):
                out["layer%d.T%d.%s" % (layer, tokens, what)] = value[0]
        if layer == found[-1][0]:
            for each, p in block.named_parameters():
                if p.grad is not None:
                    out["layer%d.grad.%s.%s" % (layer, path, each)] = p.grad
    return {key: np.ascontiguousarray(value.detach().numpy()) for key, value in out.items()}, meta


def main(to, *names):
    for name in names or (UNCOMMON if os.path.basename(to) == "uncommon" else MODELS):
        directory = os.path.join(to, name)
        make(name).save_pretrained(directory)
        model_class = getattr(transformers, {**MODELS, **UNCOMMON}[name][0])
        model, report = model_class.from_pretrained(directory, dtype=torch.float32,
                                                    output_loading_info=True)
        assert not any(report.values()), (name, report)
        tensors, meta = record(model.eval())
        safetensors.numpy.save_file(tensors, os.path.join(directory, "golden.safetensors"), meta)
        print(name, meta)


if __name__ == "__main__":
    main(*sys.argv[1:])
