"""Llama 1 to 3.x and Mistral, and the recipe that the models descended from them share.

Pre-norm blocks with RMS norms, rotary positions, grouped-query attention and a gated SiLU feed-forward. GGUF files
store the rows of query and key in rotated pairs (as Meta's own files do), so they are permuted back.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.checkpoint.rules import Operation, PermuteRope, Rule, WeightTable, rule
from phalanx.models.families.fields import Fields
from phalanx.models.families.rope import read_rope, stretched
from phalanx.models.spec import AttentionSpec, DecoderSpec, EmbeddingSpec, GatedMlp, NormSpec, PreNormLayer

BUFFERS = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached", "rope_freqs.weight",
           "rope_factors_long.weight", "rope_factors_short.weight")  # fmt: skip
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")


def read(fields: Fields) -> DecoderSpec:
    """Llama, and Mistral with its window."""
    window = fields.optional_integer("sliding_window") if fields.text("model_type") == "mistral" else None
    bias = fields.boolean("attention_bias", False)
    return llama_like(
        fields, family=fields.text("model_type"), windows=[window] * fields.integer("num_hidden_layers"),
        qkv_bias=bias, out_bias=bias, mlp_bias=fields.boolean("mlp_bias", False), eps=1e-6,
    )  # fmt: skip


def llama_like(
    fields: Fields, *, family: str, windows: list[int | None], qkv_bias: bool = False, out_bias: bool = False,
    mlp_bias: bool = False, qk_norm: bool = False, eps: float = 1e-6,
) -> DecoderSpec:  # fmt: skip
    hidden = fields.integer("hidden_size")
    heads, kv_heads = fields.heads()
    head_dim = fields.head_dim(hidden, heads)
    rope = read_rope(fields, head_dim)
    norm = NormSpec("rms", fields.number("rms_norm_eps", eps))
    mlp = GatedMlp(fields.integer("intermediate_size"), fields.activation("hidden_act", "silu"), mlp_bias)
    layers = tuple(
        PreNormLayer(
            AttentionSpec(
                heads, kv_heads, head_dim, head_dim**-0.5, rope, window, None, qkv_bias, out_bias,
                norm if qk_norm else None,
            ),
            mlp, norm, norm,
        )
        for window in windows
    )  # fmt: skip
    return DecoderSpec(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        embedding=EmbeddingSpec(hidden),
        final_norm=norm,
        max_positions=stretched(fields.integer("max_position_embeddings", 2048), rope),
        checkpoint_dtype=fields.dtype(),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
    )


def table(spec: DecoderSpec, layer_rules: Mapping[str, str | tuple[str, ...]]) -> WeightTable:
    """A table in the naming that Hugging Face uses for all descendants of Llama."""
    rules = [rule("embed_tokens.weight", "embedding.weight"), rule("norm.weight", "final_norm.weight")]
    rules += [rule(f"layers.{{layer}}.{s}", _targets(t)) for s, t in layer_rules.items()]
    return finished(spec, rules, "lm_head.weight", prefixes=PREFIXES)


def finished(
    spec: DecoderSpec, rules: list[Rule], head: str, *, prefixes: tuple[str, ...] = (), ignored: tuple[str, ...] = (),
    keys: Mapping[str, str] | None = None,
) -> WeightTable:  # fmt: skip
    """The table with its output head: a rule when it has its own, perhaps a copy when the embedding is tied."""
    copies: tuple[Rule, ...] = ()
    if spec.tie_embeddings:
        copies = (rule(head, "embedding.weight"),)
    else:
        rules = [*rules, rule(head, "head.weight")]
    return WeightTable(tuple(rules), ignored + BUFFERS, copies, prefixes, keys or {})


def _targets(names: str | tuple[str, ...]) -> list[str]:
    return [f"layers.{{layer}}.{n}" for n in ((names,) if isinstance(names, str) else names)]


ATTENTION = {
    "self_attn.q_proj.{kind}": "attention.q.{kind}",
    "self_attn.k_proj.{kind}": "attention.k.{kind}",
    "self_attn.v_proj.{kind}": "attention.v.{kind}",
    "self_attn.o_proj.{kind}": "attention.out.{kind}",
}
QK_NORM = {"self_attn.q_norm.weight": "attention.q_norm.weight", "self_attn.k_norm.weight": "attention.k_norm.weight"}
MLP = {
    "mlp.gate_proj.{kind}": "mlp.gate.{kind}",
    "mlp.up_proj.{kind}": "mlp.up.{kind}",
    "mlp.down_proj.{kind}": "mlp.down.{kind}",
}
NORMS = {"input_layernorm.weight": "attention_norm.weight", "post_attention_layernorm.weight": "mlp_norm.weight"}


def weights(spec: DecoderSpec) -> WeightTable:
    return table(spec, ATTENTION | MLP | NORMS)


GGUF_ATTENTION = {
    "attn_q.{kind}": "attention.q.{kind}",
    "attn_k.{kind}": "attention.k.{kind}",
    "attn_v.{kind}": "attention.v.{kind}",
    "attn_output.{kind}": "attention.out.{kind}",
}
GGUF_QK_NORM = {"attn_q_norm.weight": "attention.q_norm.weight", "attn_k_norm.weight": "attention.k_norm.weight"}
GGUF_MLP = {
    "ffn_gate.{kind}": "mlp.gate.{kind}",
    "ffn_up.{kind}": "mlp.up.{kind}",
    "ffn_down.{kind}": "mlp.down.{kind}",
}
GGUF_NORMS = {"attn_norm.{kind}": "attention_norm.{kind}", "ffn_norm.{kind}": "mlp_norm.{kind}"}


def gguf_table(
    spec: DecoderSpec,
    layer_rules: Mapping[str, str | tuple[str, ...]],
    operations: Mapping[str, tuple[Operation, ...]] | None = None,
) -> WeightTable:
    rules = [rule("token_embd.weight", "embedding.weight"), rule("output_norm.{kind}", "final_norm.{kind}")]
    operations = operations or {}
    rules += [rule(f"blk.{{layer}}.{s}", _targets(t), *operations.get(s, ())) for s, t in layer_rules.items()]
    return finished(spec, rules, "output.weight")


def gguf_weights(spec: DecoderSpec) -> WeightTable:
    pairs = (PermuteRope(spec.layers[0].attention.head_dim),)
    return gguf_table(spec, GGUF_ATTENTION | GGUF_MLP | GGUF_NORMS, {"attn_q.{kind}": pairs, "attn_k.{kind}": pairs})
