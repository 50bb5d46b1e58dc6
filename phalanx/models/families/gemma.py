"""Gemma 2 and the text part of Gemma 3.

RMS norms before and after each part, with weights stored less one (GGUF files store them whole); token embeddings
times the square root of the hidden size; windows in some layers. Gemma 2 soft-caps scores and logits; Gemma 3 norms
queries and keys and rotates its windowed layers with a base of their own. The vision part of a Gemma 3 checkpoint is
left unread.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.checkpoint.rules import Add, WeightTable
from phalanx.errors import UnsupportedModel
from phalanx.models.families import llama
from phalanx.models.families.fields import Fields
from phalanx.models.families.rope import read_rope
from phalanx.models.spec import AttentionSpec, DecoderSpec, EmbeddingSpec, GatedMlp, NormSpec, PreNormLayer

_NORMS: dict[str, str] = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "attention_post_norm.weight",
    "pre_feedforward_layernorm.weight": "mlp_norm.weight",
    "post_feedforward_layernorm.weight": "mlp_post_norm.weight",
}
_GGUF_NORMS: dict[str, str] = {
    "attn_norm.weight": "attention_norm.weight",
    "post_attention_norm.weight": "attention_post_norm.weight",
    "ffn_norm.weight": "mlp_norm.weight",
    "post_ffw_norm.weight": "mlp_post_norm.weight",
}
_VISION = ("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*")

# What a Gemma 3 text config may leave out.
_GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GEMMA2 = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "max_position_embeddings": 8192}


def read(fields: Fields) -> DecoderSpec:
    model_type = fields.text("model_type")
    if model_type == "gemma2":
        return _gemma2(Fields(_GEMMA2 | _present(fields)))
    text = fields.section("text_config")
    if text is not None:
        outer = {key: fields.values[key] for key in ("dtype", "torch_dtype") if fields.values.get(key)}
        return _gemma3(Fields(_GEMMA3 | outer | _present(text)))
    return _gemma3(Fields(_GEMMA3 | _present(fields)))


def _present(fields: Fields) -> dict[str, object]:
    return {key: value for key, value in fields.values.items() if value is not None}


def _gemma2(fields: Fields) -> DecoderSpec:
    count = fields.integer("num_hidden_layers")
    rope = read_rope(fields, fields.integer("head_dim"))
    sliding = fields.sliding_layers(count, [layer % 2 == 0 for layer in range(count)])
    attention = _attention(fields, fields.optional_number("attn_logit_softcapping"))
    windowed = replace(attention, rope=rope, window=fields.integer("sliding_window"))
    full = replace(attention, rope=rope)
    return _spec(fields, "gemma2", [windowed if slides else full for slides in sliding])


def _gemma3(fields: Fields) -> DecoderSpec:
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedModel("Gemma 3 models with `use_bidirectional_attention` are not supported.")
    count, head_dim = fields.integer("num_hidden_layers"), fields.integer("head_dim")
    every = fields.integer("sliding_window_pattern", 6)
    sliding = fields.sliding_layers(count, [(layer + 1) % every != 0 for layer in range(count)])
    attention = _attention(fields, fields.optional_number("attn_logit_softcapping"))
    attention = replace(attention, qk_norm=_norm(fields))
    full = replace(attention, rope=read_rope(fields, head_dim, theta=1e6, layer_type="full_attention"))
    # Before there was one section per kind of layer, the windowed layers' base had a key of its own, never scaled.
    local = fields.number("rope_local_base_freq", 10000.0)
    nested = fields.section("rope_parameters") is not None
    inner = fields if nested else Fields({**fields.values, "rope_theta": local})
    rope = read_rope(inner, head_dim, theta=local, layer_type="sliding_attention", scaled=False)
    windowed = replace(attention, rope=rope, window=fields.integer("sliding_window"))
    return _spec(fields, "gemma3_text", [windowed if slides else full for slides in sliding])


def _norm(fields: Fields) -> NormSpec:
    return NormSpec("rms", fields.number("rms_norm_eps", 1e-6), wide=True)


def _attention(fields: Fields, soft_cap: float | None) -> AttentionSpec:
    heads, kv_heads = fields.heads()
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    bias = fields.boolean("attention_bias", False)
    return AttentionSpec(
        heads, kv_heads, fields.integer("head_dim"), scale, soft_cap=soft_cap, qkv_bias=bias, out_bias=bias
    )


def _spec(fields: Fields, family: str, attentions: list[AttentionSpec]) -> DecoderSpec:
    hidden, norm = fields.integer("hidden_size"), _norm(fields)
    mlp = GatedMlp(fields.integer("intermediate_size"), fields.activation("hidden_activation", "gelu_pytorch_tanh"))
    return DecoderSpec(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(PreNormLayer(attention, mlp, norm, norm, norm, norm) for attention in attentions),
        embedding=EmbeddingSpec(hidden, scale=hidden**0.5),
        final_norm=norm,
        max_positions=fields.integer("max_position_embeddings"),
        checkpoint_dtype=fields.dtype(),
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


def _has_qk_norm(spec: DecoderSpec) -> bool:
    return spec.layers[0].attention.qk_norm is not None


def weights(spec: DecoderSpec) -> WeightTable:
    qk_norm = llama.QK_NORM if _has_qk_norm(spec) else {}
    table = llama.table(spec, llama.ATTENTION | qk_norm | llama.MLP | _NORMS)
    rules = tuple(replace(rule, operations=(Add(1.0),)) if "norm" in rule.targets[0] else rule for rule in table.rules)
    return replace(table, rules=rules, ignored=table.ignored + _VISION)


def gguf_weights(spec: DecoderSpec) -> WeightTable:
    qk_norm = llama.GGUF_QK_NORM if _has_qk_norm(spec) else {}
    return llama.gguf_table(spec, llama.GGUF_ATTENTION | qk_norm | llama.GGUF_MLP | _GGUF_NORMS)
