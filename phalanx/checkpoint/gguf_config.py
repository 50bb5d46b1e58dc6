"""GGUF metadata as the dictionary that Hugging Face's config.json holds for the same family.

One recipe then reads both kinds of checkpoint. Values that the metadata does not carry are taken from the tensors
(vocabulary size, tied embeddings, biases, RoPE factors) or are the family's constants as llama.cpp has them. Weight
names and layouts are not covered here (`phalanx.checkpoint.rules`). `"torch_dtype": "gguf"` marks the origin.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any

from phalanx.checkpoint.gguf_header import GGUFFile
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel

_LARGEST = 2**31 - 1
_BLOCK_NAME = re.compile(r"blk\.(\d{1,9})\.")

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """The config.json dictionary of the model in `gguf`.

    Raises UnsupportedModel for an architecture that is not known here and FormatError when the metadata is missing,
    of the wrong type, or contradicts the tensors.
    """
    metadata = _Metadata(gguf)
    family = _FAMILIES.get(metadata.architecture)
    if family is None:
        raise UnsupportedModel(
            f"{gguf.path} holds a model of the architecture '{metadata.architecture[:40]}', which is not supported.",
            fix=f"Supported GGUF architectures: {', '.join(sorted(_FAMILIES))}.",
        )
    if metadata.number("expert_count", 0):
        raise metadata.unsupported("it is a mixture of experts")
    config = family(metadata)
    config |= {
        "vocab_size": metadata.vocab_size,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "gguf",
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        token = metadata.token_id(key)
        if token is not None:
            config[f"{name}_token_id"] = token
    return config


def generation_config(gguf: GGUFFile) -> dict[str, Any]:
    """What generation_config.json would hold: every end-of-answer token, and the sampling defaults where given."""
    metadata = _Metadata(gguf)
    result: dict[str, Any] = {}
    ends = dict.fromkeys(token for key in ("eos", "eot", "eom") if (token := metadata.token_id(key)) is not None)
    if ends:
        result["eos_token_id"] = list(ends)
    bos = metadata.token_id("bos")
    if bos is not None:
        result["bos_token_id"] = bos
    for key, name in _SAMPLING.items():
        value = gguf.metadata.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            result[name] = value
    return result


class _Metadata:
    """Checked access to one file's metadata; keys are those of its architecture."""

    def __init__(self, gguf: GGUFFile):
        self._gguf = gguf
        architecture = gguf.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise FormatError(f"{gguf.path} does not say which architecture it holds.")
        self.architecture = architecture

    def fail(self, what: str) -> FormatError:
        return FormatError(
            f"{self._gguf.path} contradicts itself or is incomplete: {what}.", fix="Fetch or convert it again."
        )

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._gguf.path} holds a model that is not supported: {what}.")

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number. A list with one value per layer is accepted when all are equal."""
        value = self._gguf.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                raise self.unsupported(f"its layers differ in `{key}`")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise self.fail(f"`{self.architecture}.{key}` is {'missing' if value is None else 'not a sensible number'}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.number(key, default)
        if value == 0:
            raise self.fail(f"`{self.architecture}.{key}` is 0")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._gguf.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(f"`{self.architecture}.{key}` is {'missing' if value is None else 'not a finite number'}")
        return float(value)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._gguf.metadata

    def raw(self, key: str) -> Any:
        return self._gguf.metadata.get(f"{self.architecture}.{key}")

    def token_id(self, kind: str) -> int | None:
        value = self._gguf.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self.vocab_size:
            return None  # converters write 2³²-1 and the like for "none"
        return value

    def has_tensor(self, name: str) -> bool:
        return name in self._gguf.tensors

    def rows(self, name: str) -> int:
        """First dimension of a tensor that must be there."""
        if name not in self._gguf.tensors:
            raise self.fail(f"the tensor `{name}` is missing")
        return self._gguf.tensors[name].shape[0]

    @property
    def vocab_size(self) -> int:
        rows = self.rows("token_embd.weight")
        tokens = self._gguf.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != rows:
            raise self.fail(f"its vocabulary has {len(tokens)} tokens, but its embedding has {rows} rows")
        return rows

    @property
    def layers(self) -> int:
        """The number of layers, equal to the number of `blk.N` groups that are really there."""
        claimed = self.size("block_count")
        present = {int(match[1]) for name in self._gguf.tensors if (match := _BLOCK_NAME.match(name))}
        if len(present) != claimed or max(present) != claimed - 1:
            raise self.fail(f"it claims {claimed} layers, but has tensors for {len(present)}")
        return claimed

    def hidden(self) -> int:
        size = self.size("embedding_length")
        embedding = self._gguf.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape[1:] != (size,):
            raise self.fail(f"its embedding has the shape {embedding.shape}, not one row of {size} per token")
        return size

    def factors(self, name: str, count: int) -> list[float] | None:
        """The `count` values of a small float32 tensor of RoPE factors, or None when there is no such tensor."""
        info = self._gguf.tensors.get(name)
        if info is None:
            return None
        if info.dtype != "F32" or info.shape != (count,):
            raise self.fail(
                f"the tensor `{name}` is {info.dtype} of the shape {info.shape}, not {count} float32 values"
            )
        try:
            with info.file.open("rb") as file:
                file.seek(info.offset)
                values = list(struct.unpack(f"<{count}f", file.read(info.nbytes)))
        except OSError as error:
            raise CheckpointError(f"{info.file} cannot be read: {error.strerror or error}.") from None
        except struct.error:
            raise self.fail(f"the tensor `{name}` is cut off") from None
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise self.fail(f"the tensor `{name}` holds values that are not positive numbers")
        return values


# -- parts that several families share -------------------------------------------------------------------------------


def _attention_shape(m: _Metadata) -> dict[str, Any]:
    hidden, heads = m.hidden(), m.size("attention.head_count")
    if not m.has("attention.key_length") and hidden % heads:
        raise m.fail(f"{heads} heads do not divide its width of {hidden}, and no head width is given")
    head_dim = m.size("attention.key_length", hidden // heads)
    if m.size("attention.value_length", head_dim) != head_dim:
        raise m.unsupported("its key and value heads differ in width")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": m.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }


def _rope(m: _Metadata, head_dim: int, default_theta: float = 10000.0) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes them."""
    rotary = m.size("rope.dimension_count", head_dim)
    if rotary > head_dim or rotary % 2:
        raise m.fail(f"RoPE covers {rotary} of {head_dim} elements of a head")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": m.real("rope.freq_base", default_theta)}
    if rotary != head_dim:
        factor = rotary / head_dim
        rope["partial_rotary_factor"] = factor if int(head_dim * factor) == rotary else math.nextafter(factor, 1.0)
    context = m.size("context_length")
    kind = m.raw("rope.scaling.type")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": m.real("rope.scaling.factor", 1.0)}
    elif m.has("rope.scale_linear"):  # files from before 2024
        rope |= {"rope_type": "linear", "factor": m.real("rope.scale_linear")}
    elif kind not in (None, "none", "longrope"):
        raise m.unsupported(f"it scales RoPE by '{str(kind)[:40]}'")
    if rope["rope_type"] == "linear" and rope["factor"] in (0.0, 1.0):
        rope["rope_type"] = "default"
        del rope["factor"]
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = m.size("rope.scaling.original_context_length", context)
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if m.has(f"rope.scaling.{key}"):
                rope[name] = m.real(f"rope.scaling.{key}")
    # Llama 3's scaling arrives as one divisor per frequency. That is what LongRoPE's factors are, too.
    divisors = m.factors("rope_freqs.weight", rotary // 2)
    if divisors is not None and any(value != 1.0 for value in divisors):
        rope |= {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": m.size("rope.scaling.original_context_length", context),
        }
        rope.pop("factor", None)
    return rope


def _gated_decoder(m: _Metadata, model_type: str, architecture: str) -> dict[str, Any]:
    """What all families with RMS norms, RoPE and a gated feed-forward have in common."""
    attention = _attention_shape(m)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **attention,
        "num_hidden_layers": m.layers,
        "intermediate_size": m.size("feed_forward_length"),
        "max_position_embeddings": m.size("context_length"),
        "rms_norm_eps": _epsilon(m, "attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope(m, attention["head_dim"]),
    }


def _epsilon(m: _Metadata, key: str) -> float:
    """The decimal number that the stored float32 came from (1e-05, not 9.99999974e-06), as config.json has it."""
    return float(f"{m.real(key):.6g}")


def _sliding_window(m: _Metadata) -> int | None:
    return m.number("attention.sliding_window", 0) or None


def _layer_types(m: _Metadata, layers: int, period: int) -> list[str]:
    """Sliding layers with a full one at the end of each `period`, or as the file says."""
    pattern = m.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise m.fail(f"its pattern of sliding windows has {len(pattern)} entries for {layers} layers")
        return ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    if pattern is not None:
        period = m.size("attention.sliding_window_pattern")
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]


# -- families --------------------------------------------------------------------------------------------------------


def _llama(m: _Metadata) -> dict[str, Any]:
    """Llama, and Mistral where the file gives a sliding window."""
    window = _sliding_window(m)
    if window is None:
        config = _gated_decoder(m, "llama", "LlamaForCausalLM")
    else:
        config = _gated_decoder(m, "mistral", "MistralForCausalLM") | {"sliding_window": window}
    return config | {
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": m.has_tensor("blk.0.ffn_gate.bias"),
    }


def _qwen2(m: _Metadata) -> dict[str, Any]:
    return _gated_decoder(m, "qwen2", "Qwen2ForCausalLM") | {"use_sliding_window": False, "sliding_window": None}


def _qwen3(m: _Metadata) -> dict[str, Any]:
    return _gated_decoder(m, "qwen3", "Qwen3ForCausalLM") | {
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
    }


def _qwen(m: _Metadata) -> dict[str, Any]:
    """Qwen 1. Its config counts both halves of the gated feed-forward in `intermediate_size`. The file does not say
    how positions beyond the training length are treated; llama.cpp does nothing special with them, and neither do we.
    """
    attention = _attention_shape(m)
    head_dim = attention["head_dim"]
    context = m.size("context_length")
    return {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "hidden_size": attention["hidden_size"],
        "num_attention_heads": attention["num_attention_heads"],
        "kv_channels": head_dim,
        "num_hidden_layers": m.layers,
        "intermediate_size": 2 * m.rows("blk.0.ffn_gate.weight"),
        "max_position_embeddings": context,
        "seq_length": context,
        "layer_norm_epsilon": _epsilon(m, "attention.layer_norm_rms_epsilon"),
        "rotary_emb_base": m.real("rope.freq_base", 10000.0),
        "rotary_pct": m.size("rope.dimension_count", head_dim) / head_dim,
        "no_bias": True,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "scale_attn_weights": True,
    }


def _gpt2(m: _Metadata) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": m.hidden(),
        "n_head": m.size("attention.head_count"),
        "n_layer": m.layers,
        "n_inner": m.size("feed_forward_length"),
        "n_positions": m.size("context_length"),
        "layer_norm_epsilon": _epsilon(m, "attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _phi3(m: _Metadata) -> dict[str, Any]:
    config = _gated_decoder(m, "phi3", "Phi3ForCausalLM")
    context = config["max_position_embeddings"]
    rope = config["rope_parameters"]
    rope.setdefault("partial_rotary_factor", 1.0)
    rotary = m.size("rope.dimension_count", config["head_dim"])
    original = m.size("rope.scaling.original_context_length", context)
    short = m.factors("rope_factors_short.weight", rotary // 2)
    long = m.factors("rope_factors_long.weight", rotary // 2)
    if (short is None) != (long is None):
        raise m.fail("it has only one of the two tensors of RoPE factors")
    if short is not None:
        rope |= {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
        if m.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = m.real("rope.scaling.attn_factor")
    return config | {"original_max_position_embeddings": original, "sliding_window": _sliding_window(m)}


def _gemma(m: _Metadata, model_type: str, architecture: str, *, largest: int, period: int) -> dict[str, Any]:
    """Gemma 2 and 3. Only the model with `largest` layers (27B) scales its queries by another number than the head's
    width. One layer in `period` sees the whole context."""
    config = _gated_decoder(m, model_type, architecture)
    del config["hidden_act"]
    layers = config["num_hidden_layers"]
    by_width = config["hidden_size"] // config["num_attention_heads"]
    window = m.number("attention.sliding_window", 4096 if model_type == "gemma2" else 0) or None
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": by_width if layers == largest else config["head_dim"],
        "sliding_window": window,
        "layer_types": _layer_types(m, layers, period) if window else ["full_attention"] * layers,
        "attention_bias": False,
    }


def _gemma2(m: _Metadata) -> dict[str, Any]:
    return _gemma(m, "gemma2", "Gemma2ForCausalLM", largest=46, period=2) | {
        "attn_logit_softcapping": m.real("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": m.real("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(m: _Metadata) -> dict[str, Any]:
    """The text model. Sliding layers have a RoPE base of their own and no scaling."""
    config = _gemma(m, "gemma3_text", "Gemma3ForCausalLM", largest=62, period=6)
    return config | {
        "rope_parameters": {
            "full_attention": _rope(m, config["head_dim"], default_theta=1000000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": m.real("rope.freq_base_swa", 10000.0)},
        },
        "attn_logit_softcapping": m.real("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": m.real("final_logit_softcapping", 0.0) or None,
    }


_FAMILIES: dict[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen": _qwen,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
