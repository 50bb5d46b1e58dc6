"""What several processes have counted, as numbers that can be sent and added up.

`counts` takes everything out of a registry, `summed` adds what several say, `lasting` is what stays true of a process
that has ended, and `as_metrics` puts the sums in the place of a registry's own numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

_Labels = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, array_like=True):
    """One metric: its kind in Prometheus's words, and values by sample name and labels."""

    kind: str
    samples: list[tuple[str, _Labels, float]]


Counts = dict[str, Family]
"""By the metric's name."""


def counts(registry: CollectorRegistry) -> Counts:
    return {
        metric.name: Family(
            metric.type, [(sample.name, tuple(sample.labels.items()), sample.value) for sample in metric.samples]
        )
        for metric in registry.collect()
    }


def summed(parts: Iterable[Counts]) -> Counts:
    """Sums; of times at which something began, the first."""
    values: dict[str, dict[tuple[str, _Labels], float]] = {}
    kinds: dict[str, str] = {}
    for part in parts:
        for name, family in part.items():
            kinds.setdefault(name, family.kind)
            known = values.setdefault(name, {})
            for sample, labels, value in family.samples:
                key = (sample, labels)
                if key not in known:
                    known[key] = value
                elif sample.endswith(("_created", "_start_time_seconds")):
                    known[key] = min(known[key], value)
                else:
                    known[key] += value
    return {
        name: Family(kinds[name], [(*key, value) for key, value in known.items()]) for name, known in values.items()
    }


def lasting(part: Counts) -> Counts:
    """What has been counted stays counted; what is measured now ends with its process."""
    return {name: family for name, family in part.items() if family.kind in ("counter", "histogram")}


def as_metrics(registry: CollectorRegistry, values: Counts) -> Iterator[Metric]:
    """The registry's metrics, described as they are there, with these values."""
    for metric in registry.collect():
        family = values.get(metric.name)
        if family is not None:
            metric.samples = [Sample(name, dict(labels), value) for name, labels, value in family.samples]
        yield metric
