"""How a checkpoint's tensors become our weights, as data: rename, concatenate, split, transpose, permute, add.

A `WeightTable` is a list of `Rule`s. `bind` matches it against the tensors that a checkpoint has and the weights that
a model needs, and raises unless every tensor is used, every weight is filled and every rule has matched. `export`
runs the rules backwards. Works on shapes and on any array with `reshape` and `swapaxes` (numpy, torch); reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from phalanx.checkpoint.quantized import QuantizedInfo
from phalanx.checkpoint.tensor_info import TensorInfo
from phalanx.errors import CheckpointError

Shape = tuple[int, ...]

Part = tuple[tuple[int, int], ...]
"""A part of an array: for each of its dimensions, first index and end."""


class Weight(Protocol):
    """What `bind` needs to know of a weight (`models.spec.WeightSpec` has it)."""

    @property
    def shape(self) -> Shape: ...

    @property
    def keys(self) -> tuple[str, ...]: ...


class Operation(Protocol):
    @property
    def keeps_rows(self) -> bool:
        """Whether it only puts whole rows in another order, whatever they hold."""
        ...

    def shape(self, shape: Shape) -> Shape:
        """The shape after `apply`. Raises ValueError when the operation does not fit."""
        ...

    def apply(self, array: Any) -> Any: ...

    def undo(self, array: Any) -> Any: ...

    def source(self, part: Part) -> Part:
        """The part of the input that this part of the output needs."""
        ...

    def result(self, part: Part) -> Part:
        """The part of the output that comes of this part of the input, as `source` gave it."""
        ...


@dataclass(frozen=True)
class Transpose:
    """[inputs, outputs] to [outputs, inputs]; vectors stay as they are."""

    keeps_rows = False

    def shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def apply(self, array: Any) -> Any:
        return array.swapaxes(0, 1) if len(array.shape) == 2 else array

    def undo(self, array: Any) -> Any:
        return self.apply(array)

    def source(self, part: Part) -> Part:
        return part[::-1]

    result = source


@dataclass(frozen=True)
class PermuteRope:
    """Rows of each head from pairs (x0, y0, x1, y1, …) to halves (x0, x1, …, y0, y1, …)."""

    head_dim: int
    keeps_rows = True

    def shape(self, shape: Shape) -> Shape:
        if shape[0] % self.head_dim or self.head_dim % 2:
            raise ValueError(f"{shape[0]} rows are not whole heads of {self.head_dim}")
        return shape

    def apply(self, array: Any) -> Any:
        shape = tuple(array.shape)
        return array.reshape(-1, self.head_dim // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)

    def undo(self, array: Any) -> Any:
        shape = tuple(array.shape)
        return array.reshape(-1, 2, self.head_dim // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)

    def source(self, part: Part) -> Part:
        (start, stop), *rest = part
        return (start // self.head_dim * self.head_dim, -(-stop // self.head_dim) * self.head_dim), *rest

    def result(self, part: Part) -> Part:
        return part


@dataclass(frozen=True)
class Add:
    """Adds a constant: some families store a norm's weight less one."""

    value: float
    keeps_rows = False

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, array: Any) -> Any:
        return array + self.value

    def undo(self, array: Any) -> Any:
        return array - self.value

    def source(self, part: Part) -> Part:
        return part

    result = source


@dataclass(frozen=True)
class Rule:
    """Tensor(s) `sources` of a file are weight(s) `targets` of ours.

    Names hold the placeholders {layer} (a number) and {kind} (weight or bias). One source and several targets split
    the rows, several sources and one target join them; `operations` come before a split and before joining.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sources) != 1 and len(self.targets) != 1:
            raise ValueError("a rule joins or splits, not both")


def rule(sources: str | Sequence[str], targets: str | Sequence[str], *operations: Operation) -> Rule:
    sources, targets = ((names,) if isinstance(names, str) else tuple(names) for names in (sources, targets))
    return Rule(sources, targets, operations)


@dataclass(frozen=True)
class WeightTable:
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    """Tensors that carry nothing a model needs (buffers that are computed); `*` stands for anything."""
    copies: tuple[Rule, ...] = ()
    """Tensors that may be there as copies of a weight that another rule fills. The loader compares them."""
    prefixes: tuple[str, ...] = ()
    """A tensor's name may start with one of these; longest first."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Our names of config keys to this family's, for messages."""


@cache
def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for name, expression in (("layer", "[0-9]+"), ("kind", "weight|bias")):
        escaped = escaped.replace(re.escape("{" + name + "}"), f"(?P<{name}>{expression})", 1)
    return re.compile(escaped)


@cache
def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")))


def _match(template: str, name: str) -> dict[str, str] | None:
    found = _pattern(template).fullmatch(name)
    return found.groupdict() if found else None


def _fill(template: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template


@dataclass(frozen=True)
class Piece:
    """A file tensor, or a range of its rows after the rule's operations, that fills rows of one weight."""

    info: TensorInfo
    operations: tuple[Operation, ...]
    skip: int
    """First row of the operations' output that belongs to the weight."""
    start: int
    """First row of the weight that this fills."""
    length: int

    @property
    def keeps_rows(self) -> bool:
        """Whether the piece's rows are rows of the file tensor as they are stored."""
        return all(operation.keeps_rows for operation in self.operations)

    def rows(self, start: int, stop: int) -> Part:
        """The piece's rows start to stop in their whole width."""
        return ((start, stop), *((0, n) for n in _shape_after(self.info, self.operations)[1:]))

    def source(self, part: Part) -> Part:
        """The part of the file tensor that this part of the piece needs."""
        return self._parts(part)[0]

    def take(self, array: Any, part: Part) -> Any:
        """The part of the piece, from what `source` says was read of the file tensor for it."""
        parts = self._parts(part)
        held = parts[0]
        for operation in self.operations:
            array, held = operation.apply(array), operation.result(held)
        return array[tuple(slice(a - h, b - h) for (a, b), (h, _) in zip(parts[-1], held, strict=True))]

    def _parts(self, part: Part) -> list[Part]:
        """What is needed before the first operation, after it, … and after the last."""
        (start, stop), *rest = part
        parts: list[Part] = [((start + self.skip, stop + self.skip), *rest)]
        for operation in reversed(self.operations):
            parts.append(operation.source(parts[-1]))
        return parts[::-1]


Binding = dict[str, tuple[Piece, ...]]
"""For each weight, the pieces that fill it, in the order of its rows."""


def bind(table: WeightTable, tensors: Mapping[str, TensorInfo], weights: Mapping[str, Weight]) -> Binding:
    """Which tensor fills which weight. Raises CheckpointError that names what is left over, missing or misshapen."""
    names = _strip(table, tensors)
    for name in _spare(table, names, weights):
        del names[name]
    binding: Binding = {}
    used: set[str] = set()
    for rule in table.rules:
        values_found = [v for name in names if (v := _match(rule.sources[0], name)) is not None]
        if not values_found:
            raise CheckpointError(
                f"The checkpoint has no tensor '{rule.sources[0]}', which its model family stores.",
                fix="Check that all weight files are there and that config.json belongs to them.",
            )
        for values in values_found:
            sources = [_fill(s, values) for s in rule.sources]
            missing = [s for s in sources if s not in names]
            if missing:
                raise CheckpointError(f"The checkpoint has '{sources[0]}' but not '{missing[0]}'.")
            used.update(sources)
            _bind_one(
                table, rule.operations, [names[s] for s in sources], [_fill(t, values) for t in rule.targets],
                weights, binding,
            )  # fmt: skip
    used.update(copy.sources[0] for copy in table.copies)
    ignored = [_glob(p) for p in table.ignored]
    unused = sorted(n for n in names if n not in used and not any(p.fullmatch(n) for p in ignored))
    if unused:
        raise CheckpointError(
            f"{len(unused)} tensor(s) of the checkpoint have no place in the model: {_some(unused)}.",
            fix="Check that config.json belongs to these weights (number of layers, biases, tied embeddings).",
        )
    unfilled = sorted(w for w in weights if w not in binding)
    if unfilled:
        raise CheckpointError(
            f"{len(unfilled)} weight(s) of the model are not in the checkpoint: {_some(unfilled)}.",
            fix="Check that all weight files are there and that config.json belongs to them.",
        )
    return binding


def bind_copies(table: WeightTable, tensors: Mapping[str, TensorInfo], weights: Mapping[str, Weight]) -> Binding:
    """Copies of weights that the checkpoint also has, as `bind` would read them. Raises CheckpointError."""
    names = _strip(table, tensors)
    binding: Binding = {}
    for copy in table.copies:
        if copy.sources[0] in names:
            _bind_one(table, copy.operations, [names[copy.sources[0]]], copy.targets, weights, binding)
    return binding


def spare_biases(
    table: WeightTable, tensors: Mapping[str, TensorInfo], weights: Mapping[str, Weight]
) -> list[TensorInfo]:
    """Biases of quantised matrices for which the model has no place: GPTQ's tools write zeros there. The loader checks
    that they are."""
    names = _strip(table, tensors)
    return [names[name] for name in _spare(table, names, weights)]


def _spare(table: WeightTable, names: Mapping[str, TensorInfo], weights: Mapping[str, Weight]) -> list[str]:
    return [
        name
        for name in names
        if name.endswith(".bias")
        and isinstance(names.get(name.removesuffix("bias") + "weight"), QuantizedInfo)
        and not any(target in weights for target in _targets_of(table, name))
    ]


def _targets_of(table: WeightTable, name: str) -> list[str]:
    found = [(rule, _match(source, name)) for rule in table.rules for source in rule.sources]
    return [_fill(target, values) for rule, values in found if values is not None for target in rule.targets]


def _strip(table: WeightTable, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    names: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        prefix = next((p for p in table.prefixes if name.startswith(p)), "")
        names[name.removeprefix(prefix)] = info
    return names


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{n[:120]}'" for n in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _bind_one(
    table: WeightTable,
    operations: tuple[Operation, ...],
    infos: Sequence[TensorInfo],
    targets: Sequence[str],
    weights: Mapping[str, Weight],
    binding: Binding,
) -> None:
    for target in targets:
        if target not in weights:
            raise CheckpointError(
                f"The config gives the model no weight '{target}', but the checkpoint has '{infos[0].name}'.",
                fix="Check that config.json belongs to these weights (number of layers, biases, tied embeddings).",
            )
        if target in binding:
            raise CheckpointError(f"Tensor '{infos[0].name}' would fill weight '{target}' a second time.")
    rows = sum(weights[t].shape[0] for t in targets)
    applied = [_operations(info, operations) for info in infos]
    shapes = [_shape_after(info, own) for info, own in zip(infos, applied, strict=True)]
    expected = (rows, *weights[targets[0]].shape[1:])
    found = (sum(s[0] for s in shapes), *shapes[0][1:])
    if found != expected or any(s[1:] != shapes[0][1:] for s in shapes):
        keys = dict.fromkeys(table.keys.get(key, key) for target in targets for key in weights[target].keys)
        turned = "" if found == infos[0].shape or len(infos) > 1 else f" (stored as {list(infos[0].shape)})"
        raise CheckpointError(
            f"Tensor '{infos[0].name}' has shape {list(found)}{turned}, but the config asks for {list(expected)}.",
            fix=f"Check {', '.join(f'`{k}`' for k in keys)} in the config: it must belong to these weights.",
        )
    if len(infos) == 1:
        skip = 0
        for target in targets:
            length = weights[target].shape[0]
            binding[target] = (Piece(infos[0], applied[0], skip, 0, length),)
            skip += length
        return
    pieces, start = [], 0
    for info, own, shape in zip(infos, applied, shapes, strict=True):
        pieces.append(Piece(info, own, 0, start, shape[0]))
        start += shape[0]
    binding[targets[0]] = tuple(pieces)


def _operations(info: TensorInfo, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """A quantised matrix is [outputs, inputs] already, in families too that store plain ones the other way."""
    if not isinstance(info, QuantizedInfo):
        return operations
    return tuple(operation for operation in operations if not isinstance(operation, Transpose))


def _shape_after(info: TensorInfo, operations: Iterable[Operation]) -> Shape:
    shape = info.shape
    try:
        if not shape:
            raise ValueError("it is a single number")
        for operation in operations:
            shape = operation.shape(shape)
    except ValueError as error:
        raise CheckpointError(f"Tensor '{info.name}' of shape {list(info.shape)} does not fit: {error}.") from None
    return shape


def export(
    table: WeightTable, weights: Mapping[str, Any], concatenate: Callable[[Sequence[Any]], Any],
    source_rows: Callable[[str], int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The tensors of a file that `bind` would read as `weights`: the rules backwards.

    `concatenate` joins arrays along their rows. `source_rows` gives the rows of each source of a joining rule.
    Raises CheckpointError for a weight that no rule covers.
    """
    tensors: dict[str, Any] = {}
    done: set[str] = set()
    for rule in table.rules:
        for values in [v for name in weights if (v := _match(rule.targets[0], name)) is not None]:
            targets = [_fill(t, values) for t in rule.targets]
            sources = [_fill(s, values) for s in rule.sources]
            done.update(targets)
            joined = weights[targets[0]] if len(targets) == 1 else concatenate([weights[t] for t in targets])
            start = 0
            for source in sources:
                rows = joined.shape[0] if len(sources) == 1 or source_rows is None else source_rows(source)
                part = joined[start : start + rows]
                start += rows
                for operation in reversed(rule.operations):
                    part = operation.undo(part)
                tensors[source] = part
    left = sorted(set(weights) - done)
    if left:
        raise CheckpointError(f"No rule covers the weight(s) {_some(left)}.")
    return tensors
