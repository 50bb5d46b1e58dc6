"""GPT-2: learned positions, layer norms, one fused attention matrix, and matrices stored as [inputs, outputs]."""

from __future__ import annotations

from dataclasses import replace

from phalanx.checkpoint.rules import Transpose, WeightTable, rule
from phalanx.models.families import llama
from phalanx.models.families.fields import Fields
from phalanx.models.spec import AttentionSpec, DecoderSpec, EmbeddingSpec, NormSpec, PlainMlp, PreNormLayer

_KEYS = {
    "num_attention_heads": "n_head", "num_key_value_heads": "n_head", "head_dim": "n_embd", "hidden_size": "n_embd",
    "embedding_size": "n_embd", "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
}  # fmt: skip


def read(fields: Fields) -> DecoderSpec:
    hidden, heads, count = fields.integer("n_embd"), fields.integer("n_head"), fields.integer("n_layer")
    head_dim = fields.head_dim(hidden, heads)
    scale = head_dim**-0.5 if fields.boolean("scale_attn_weights", True) else 1.0
    by_layer = fields.boolean("scale_attn_by_inverse_layer_idx", False)
    norm = NormSpec("layer", fields.number("layer_norm_epsilon", 1e-5))
    mlp = PlainMlp(fields.integer("n_inner", 4 * hidden), fields.activation("activation_function", "gelu_new"))
    layers = tuple(
        PreNormLayer(
            AttentionSpec(
                heads, heads, head_dim, scale / (index + 1) if by_layer else scale, qkv_bias=True, out_bias=True
            ),
            mlp, norm, norm,
        )
        for index in range(count)
    )  # fmt: skip
    positions = fields.integer("n_positions", 1024)
    return DecoderSpec(
        family="gpt2",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        embedding=EmbeddingSpec(hidden, positions=positions),
        final_norm=norm,
        max_positions=positions,
        checkpoint_dtype=fields.dtype(),
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
    )


def weights(spec: DecoderSpec) -> WeightTable:
    at, to = "h.{layer}.", "layers.{layer}."
    rules = [
        rule("wte.weight", "embedding.weight"),
        rule("wpe.weight", "positions.weight"),
        rule("ln_f.{kind}", "final_norm.{kind}"),
        rule(at + "ln_1.{kind}", to + "attention_norm.{kind}"),
        rule(at + "ln_2.{kind}", to + "mlp_norm.{kind}"),
        rule(at + "attn.c_attn.{kind}", [to + f"attention.{x}.{{kind}}" for x in "qkv"], Transpose()),
        rule(at + "attn.c_proj.{kind}", to + "attention.out.{kind}", Transpose()),
        rule(at + "mlp.c_fc.{kind}", to + "mlp.up.{kind}", Transpose()),
        rule(at + "mlp.c_proj.{kind}", to + "mlp.down.{kind}", Transpose()),
    ]
    # The causal mask is stored as a buffer by old versions.
    masks = ("h.*.attn.bias", "h.*.attn.masked_bias")
    return llama.finished(spec, rules, "lm_head.weight", prefixes=("transformer.",), ignored=masks, keys=_KEYS)


def gguf_weights(spec: DecoderSpec) -> WeightTable:
    layer: dict[str, str | tuple[str, ...]] = {
        "attn_qkv.{kind}": tuple(f"attention.{x}.{{kind}}" for x in "qkv"),
        "attn_output.{kind}": "attention.out.{kind}",
        "ffn_up.{kind}": "mlp.up.{kind}",
        "ffn_down.{kind}": "mlp.down.{kind}",
    }
    table = llama.gguf_table(spec, layer | llama.GGUF_NORMS)
    positions = rule("position_embd.weight", "positions.weight")
    return replace(table, rules=(*table.rules, positions))
