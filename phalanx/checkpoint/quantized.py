"""Matrices of small integers that lie in several tensors of a safetensors checkpoint: GPTQ, AWQ, compressed-tensors.

`read_layout` says from config.json how they are stored, `fold` makes one record of the tensors of each matrix, so that
rules and loader see a matrix [outputs, inputs] as any other. Which matrices are quantised is told by their tensors:
what a config leaves out of quantising (`ignore`, `modules_to_not_convert`) is stored as plain numbers and stays so.
What the tensors hold is read by `phalanx.loading.integers`.

Layouts: https://github.com/AutoGPTQ/AutoGPTQ and https://github.com/ModelCloud/GPTQModel (qlinear),
https://github.com/casper-hansen/AutoAWQ (WQLinear_GEMM), https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from phalanx.checkpoint.tensor_info import TensorInfo
from phalanx.errors import FormatError, UnsupportedModel

METHODS = ("gptq", "awq", "compressed-tensors")
"""Values of `quant_method` in config.json."""

SUPPORTED = (
    ("GPTQ", "`gptq`", "4 bits, formats `gptq` and `gptq_v2`, with and without zero points and `desc_act`"),
    ("AWQ", "`awq`", "4 bits, version `gemm`"),
    ("compressed-tensors w4a16", "`compressed-tensors`", "`pack-quantized` int4, for groups or channels"),
    ("compressed-tensors w8a8", "`compressed-tensors`", "`int-quantized` int8 for channels, dynamic activations"),
)
"""Rows of the support table: what it is called, its `quant_method`, what it covers."""

_BLOCK = 32
_WORD = 8
"""Four-bit integers in an int32."""
_FLOATS = ("F16", "BF16", "F32")
_WHAT_WORKS = (
    "These work: GPTQ in 4 bits (formats gptq and gptq_v2), AWQ in 4 bits (version gemm), compressed-tensors w4a16 "
    "(pack-quantized int4) and w8a8 (int-quantized int8, dynamic activations), each in groups of a multiple of "
    f"{_BLOCK} or one for a row; and GGUF files."
)

Packing = Literal["gptq", "gptq_v2", "awq", "packed", "int8"]
_MAIN: dict[Packing, str] = {
    "gptq": "qweight", "gptq_v2": "qweight", "awq": "qweight", "packed": "weight_packed", "int8": "weight",
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How matrices are stored."""

    packing: Packing
    group: int
    """Inputs that share a scale and a zero; 0 for all of a row."""
    ordered: bool = False
    """Groups are not of neighbouring inputs (`desc_act`, `actorder`)."""
    symmetric: bool = True
    """Of compressed-tensors: there are no zeros."""

    @property
    def kind(self) -> str:
        """Of the kernels' packed matrices."""
        return "INT8" if self.packing == "int8" else "INT4"

    def groups(self, inputs: int) -> int:
        return ceil(inputs / self.group) if self.group else 1


@dataclass(frozen=True)
class Layout:
    method: str
    forms: tuple[Form, ...]
    """A matrix has one of these."""


@dataclass(frozen=True)
class QuantizedInfo(TensorInfo):
    """A matrix [outputs, inputs]. `dtype` is its kind of integers, INT4 or INT8; `file` and `offset` are those of
    `integers`, and `nbytes` counts all its tensors."""

    form: Form
    integers: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None = None
    order: TensorInfo | None = None
    """int32 [inputs]: the group of each."""
    stored_shape: TensorInfo | None = None
    """int64 [2]."""


def read_layout(config: Mapping[str, Any]) -> Layout | None:
    """How the checkpoint of a config.json is quantised; None when it is not. Raises UnsupportedModel, with what was
    found and what works."""
    section = config.get("quantization_config") or config.get("compression_config")
    if not section:
        return None
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    match method:
        case "gptq":
            form = _gptq(section)
        case "awq":
            form = _awq(section)
        case "compressed-tensors":
            return Layout(method, _compressed(section))
        case _:
            raise _unsupported(f"'{str(method or 'an unknown method')[:60]}'")
    return Layout(method, (form,))


def _unsupported(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"The checkpoint is quantised with {what}, which is not supported.", fix=_WHAT_WORKS)


def _group(what: str, size: Any) -> int:
    if size == -1:
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0 or size % _BLOCK:
        raise _unsupported(f"{what} in groups of {str(size)[:20]}")
    return size


def _gptq(section: Mapping[str, Any]) -> Form:
    _check_bits("GPTQ", section.get("bits"))
    stored = str(section.get("checkpoint_format") or section.get("format") or "gptq").lower()
    if section.get("is_marlin_format"):
        stored = "marlin"
    if stored not in ("gptq", "gptq_v2"):
        raise _unsupported(f"GPTQ in the format '{stored[:40]}'")
    if str(section.get("pack_dtype") or "int32") != "int32":
        raise _unsupported(f"GPTQ packed into {str(section['pack_dtype'])[:40]}")
    if section.get("adapter"):
        raise _unsupported("GPTQ and an adapter")
    rules = section.get("dynamic") or {}
    for pattern, own in rules.items() if isinstance(rules, Mapping) else ():
        if isinstance(own, Mapping) and not pattern.startswith("-:"):
            for key in ("bits", "group_size"):
                if key in own and own[key] != section.get(key):
                    raise _unsupported(f"GPTQ with another `{key}` for some layers")
    group = _group("GPTQ", section.get("group_size", 128))
    packing: Packing = "gptq" if stored == "gptq" else "gptq_v2"
    return Form(packing, group, ordered=bool(section.get("desc_act")) and group > 0)


def _awq(section: Mapping[str, Any]) -> Form:
    _check_bits("AWQ", section.get("bits", section.get("w_bit")))
    version = str(section.get("version") or section.get("checkpoint_format") or section.get("format") or "gemm").lower()
    if version != "gemm":
        raise _unsupported(f"AWQ in the version '{version[:40]}'")
    if section.get("zero_point") is False:
        raise _unsupported("AWQ without zero points")
    return Form("awq", _group("AWQ", section.get("group_size", section.get("q_group_size", 128))))


def _check_bits(method: str, bits: Any) -> None:
    if bits != 4:
        raise _unsupported(f"{method} in {str(bits)[:20]} bits")


def _compressed(section: Mapping[str, Any]) -> tuple[Form, ...]:
    name = "compressed-tensors"
    if section.get("kv_cache_scheme"):
        raise _unsupported(f"{name} and a quantised KV cache (`kv_cache_scheme`)")
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise _unsupported(f"{name} and made sparse ('{str(sparsity['format'])[:40]}')")
    if section.get("transform_config"):
        raise _unsupported(f"{name} and transformed (`transform_config`)")
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported(f"{name} without `config_groups`")
    return tuple(dict.fromkeys(_compressed_form(section, scheme) for scheme in groups.values()))


def _compressed_form(section: Mapping[str, Any], scheme: Any) -> Form:
    scheme = scheme if isinstance(scheme, Mapping) else {}
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    weights = weights if isinstance(weights, Mapping) else {}
    stored, bits = str(scheme.get("format") or section.get("format")), weights.get("num_bits", 8)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:  # it follows from the size of the groups
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    integers = weights.get("type", "int") == "int" and not weights.get("dynamic")
    integers = integers and not scheme.get("output_activations")
    symmetric = weights.get("symmetric", True) is not False
    if integers and bits == 4 and not inputs and stored == "pack-quantized" and strategy in ("group", "channel"):
        group = _group("compressed-tensors", size) if strategy == "group" else 0
        ordered = group > 0 and weights.get("actorder") in (True, "group", "dynamic")
        return Form("packed", group, ordered, symmetric)
    int8 = integers and bits == 8 and symmetric and strategy == "channel"
    if int8 and _are_dynamic_int8(inputs) and stored in ("int-quantized", "naive-quantized"):
        return Form("int8", 0)
    found = f"{_describe(weights)} weights and {_describe(inputs)} activations, stored as '{stored[:40]}'"
    raise _unsupported(f"compressed-tensors, {found}")


def _are_dynamic_int8(inputs: Any) -> bool:
    """Activations that are rounded as they come, so that how finely is ours to choose."""
    if not isinstance(inputs, Mapping) or inputs.get("dynamic") is not True:
        return False
    return bool(inputs.get("type", "int") == "int" and inputs.get("num_bits", 8) == 8)


def _describe(arguments: Any) -> str:
    """What a section of compressed-tensors says of numbers, in a few words."""
    if not isinstance(arguments, Mapping) or not arguments:
        return "plain"
    words = [f"{arguments.get('type', 'int')}{arguments.get('num_bits', 8)}", arguments.get("strategy")]
    if arguments.get("symmetric") is False:
        words.append("asymmetric")
    if arguments.get("dynamic"):
        words.append("dynamic")
    return " ".join(str(word)[:20] for word in words if word)


def fold(tensors: Mapping[str, TensorInfo], layout: Layout | None) -> dict[str, TensorInfo]:
    """`tensors` with one `QuantizedInfo`, named as a plain matrix would be, in place of those that make up a quantised
    one. Raises FormatError when these are incomplete or contradict each other or the config."""
    if layout is None:
        stray = next((name for name in tensors if name.endswith((".qweight", ".weight_packed"))), None)
        if stray is not None:
            raise FormatError(
                f"{tensors[stray].file}: '{stray}' is quantised, but config.json has no `quantization_config`.",
                fix="Put what quantize_config.json or quant_config.json says there under that key, with a "
                f"`quant_method` of {', '.join(METHODS)}.",
            )
        return dict(tensors)
    folded: dict[str, TensorInfo] = {}
    used: set[str] = set()
    for name, info in tensors.items():
        base, _, last = name.rpartition(".")
        forms = [form for form in layout.forms if _MAIN[form.packing] == last]
        if not base or not forms or (last == "weight" and info.dtype != "I8"):
            continue
        matrix = _Matrix(base, info, tensors, layout.method).folded(forms)
        plain = tensors.get(matrix.name)
        if plain is not None and plain is not info:
            raise FormatError(f"{info.file}: '{base}' has a plain weight and a quantised one.")
        folded[matrix.name] = matrix
        parts = (matrix.integers, matrix.scales, matrix.zeros, matrix.order, matrix.stored_shape)
        used.update(part.name for part in parts if part is not None)
    if not folded:
        names = " or ".join(f"'*.{_MAIN[form.packing]}'" for form in layout.forms)
        raise FormatError(
            f"The config says that the checkpoint is quantised with {layout.method}, but no tensor is {names}.",
            fix="Check that config.json belongs to these weights.",
        )
    return {name: info for name, info in tensors.items() if name not in used} | folded


@dataclass(frozen=True)
class _Matrix:
    """One on its way from tensors to a record."""

    base: str
    main: TensorInfo
    tensors: Mapping[str, TensorInfo]
    method: str

    def folded(self, forms: list[Form]) -> QuantizedInfo:
        """In that of the forms that fits its scales."""
        shape = self.main.shape
        if len(shape) != 2 or self.main.dtype != ("I8" if forms[0].packing == "int8" else "I32"):
            raise self._wrong(f"'{self.main.name}' is {self.main.dtype} {list(shape)}")
        match forms[0].packing:
            case "gptq" | "gptq_v2":
                return self._columns(forms[0], shape[1], shape[0] * _WORD)
            case "awq":
                return self._columns(forms[0], shape[1] * _WORD, shape[0])
            case "packed":
                return self._packed(forms, shape[0], shape[1] * _WORD)
            case "int8":
                return self._int8(forms[0], *shape)

    def _columns(self, form: Form, outputs: int, inputs: int) -> QuantizedInfo:
        """GPTQ and AWQ, whose tensors have a column for each output."""
        groups = form.groups(inputs)
        scales = self._part("scales", _FLOATS, (groups, outputs))
        zeros = self._part("qzeros", ("I32",), (groups, ceil(outputs / _WORD)))
        order = None
        if form.packing != "awq" and (form.ordered or f"{self.base}.g_idx" in self.tensors):
            order = self._part("g_idx", ("I32",), (inputs,))
        return self._record(form, (outputs, inputs), scales, zeros, order)

    def _packed(self, forms: list[Form], outputs: int, inputs: int) -> QuantizedInfo:
        found = self.tensors.get(f"{self.base}.weight_scale")
        has_zeros = f"{self.base}.weight_zero_point" in self.tensors
        fitting = [
            form
            for form in forms
            if found is not None
            and found.shape == (outputs, form.groups(inputs))
            and not (form.group and inputs % form.group)
            and form.symmetric != has_zeros
        ]
        form = (fitting or forms)[0]
        groups = form.groups(inputs)
        scales = self._part("weight_scale", _FLOATS, (outputs, groups))
        if form.group and inputs % form.group:
            raise self._wrong(f"{inputs} inputs are not whole groups of {form.group}")
        zeros = order = None
        if not form.symmetric:
            zeros = self._part("weight_zero_point", ("I32",), (ceil(outputs / _WORD), groups))
        elif has_zeros:
            raise self._wrong("it has zero points, which the config says it has not")
        if form.ordered or f"{self.base}.weight_g_idx" in self.tensors:
            order = self._part("weight_g_idx", ("I32",), (inputs,))
        shape = self._part("weight_shape", ("I64", "I32"), (2,))
        return self._record(form, (outputs, inputs), scales, zeros, order, shape)

    def _int8(self, form: Form, outputs: int, inputs: int) -> QuantizedInfo:
        scales = self._part("weight_scale", _FLOATS, (outputs, 1))
        for other in ("input_scale", "weight_zero_point"):
            if f"{self.base}.{other}" in self.tensors:
                raise self._wrong(f"it has '{other}', which the config does not provide for")
        return self._record(form, (outputs, inputs), scales)

    def _record(
        self, form: Form, shape: tuple[int, int], scales: TensorInfo, zeros: TensorInfo | None = None,
        order: TensorInfo | None = None, stored_shape: TensorInfo | None = None,
    ) -> QuantizedInfo:  # fmt: skip
        main, parts = self.main, (self.main, scales, zeros, order, stored_shape)
        nbytes = sum(part.nbytes for part in parts if part is not None)
        return QuantizedInfo(
            f"{self.base}.weight", form.kind, shape, main.file, main.offset, nbytes, form, main, scales, zeros, order,
            stored_shape,
        )  # fmt: skip

    def _part(self, last: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> TensorInfo:
        name = f"{self.base}.{last}"
        info = self.tensors.get(name)
        if info is None:
            raise self._wrong(f"'{name}' is missing")
        if info.dtype not in dtypes or info.shape != shape:
            wanted = f"{' or '.join(dtypes)} {list(shape)}"
            raise self._wrong(f"'{name}' is {info.dtype} {list(info.shape)} where the config asks for {wanted}")
        return info

    def _wrong(self, what: str) -> FormatError:
        return FormatError(
            f"{self.main.file}: the tensors of '{self.base}' are not those of a matrix quantised with {self.method}: "
            f"{what}.",
            fix="Check that the download is complete and that config.json belongs to these weights.",
        )
