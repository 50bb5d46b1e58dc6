"""Checked reading of a checkpoint's config dictionary: a wrong value is one clear error, never a crash later on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx.errors import CheckpointError, UnsupportedModel
from phalanx.models.spec import Activation, CheckpointType

# Above any model that exists; a hostile config cannot make us build millions of records.
_LIMITS = {"num_hidden_layers": 2048, "n_layer": 2048}
_LIMIT = 1 << 28

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_REQUIRED: Any = object()


class Fields:
    """A config dictionary, read by name. An absent or null key takes the default, or is an error without one."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"The model's config has no `{key}`.", fix="Check that config.json is complete.")
        return default

    def _wrong(self, key: str, value: Any, what: str) -> CheckpointError:
        return CheckpointError(f"`{key}` in the model's config is {str(value)[:60]!r}, but must be {what}.")

    def integer(self, key: str, default: int = _REQUIRED, *, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        limit = _LIMITS.get(key, _LIMIT)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= limit:
            raise self._wrong(key, value, f"a whole number from {minimum} to {limit}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        values = self._get(key, _REQUIRED)
        good = isinstance(values, list | tuple) and len(values) == length
        if not good or not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
            raise self._wrong(key, values, f"a list of {length} numbers above 0")
        return tuple(float(v) for v in values)

    def section(self, key: str) -> Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "a section")
        return Fields(value)

    def activation(self, key: str, default: str) -> Activation:
        name = self.text(key, default)
        if name not in _ACTIVATIONS:
            raise UnsupportedModel(
                f"The model's activation function '{name[:60]}' is not supported.",
                fix=f"Supported are {', '.join(sorted(_ACTIVATIONS))}.",
            )
        return _ACTIVATIONS[name]

    def dtype(self) -> CheckpointType:
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        match str(name).removeprefix("torch."):
            case "float32":
                return "float32"
            case "bfloat16":
                return "bfloat16"
            case "float16":
                return "float16"
            case "gguf":
                return "quantized"
        raise UnsupportedModel(
            f"The checkpoint's type '{str(name)[:60]}' is not supported.",
            fix="Supported are float32, bfloat16, float16.",
        )

    def sliding_layers(self, num_layers: int, default: list[bool]) -> list[bool]:
        """Per layer, whether its attention slides: `layer_types`, or `default`."""
        types = self.values.get("layer_types")
        if types is None:
            return default
        if not isinstance(types, list) or len(types) != num_layers:
            raise self._wrong("layer_types", types, f"a list of {num_layers} layer types")
        unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
        if unknown:
            raise UnsupportedModel(f"Layers of type '{str(unknown[0])[:60]}' are not supported.")
        return [t == "sliding_attention" for t in types]

    def heads(self) -> tuple[int, int]:
        """(query heads, KV heads)."""
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"`num_attention_heads` is {heads}, which is not a multiple of `num_key_value_heads` = {kv_heads}."
            )
        return heads, kv_heads

    def head_dim(self, hidden: int, heads: int) -> int:
        if self.values.get("head_dim") is not None:
            return self.integer("head_dim")
        if hidden % heads:
            raise CheckpointError(f"`hidden_size` is {hidden}, which does not divide into {heads} heads.")
        return hidden // heads
