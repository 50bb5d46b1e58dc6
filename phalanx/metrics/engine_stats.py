"""Gauges and counters read from the engine's status at the moment of a scrape: no bookkeeping, no global state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phalanx.metrics.engine_snapshot import EngineSnapshot
from phalanx.metrics.speculation import SpeculationCounts

PREFIX = "phalanx:"

KINDS = ("killed", "out_of_memory", "ended", "hung", "network", "failed")
"""Of losses, shown from the start."""

STATES = ("loading", "ready", "recovering", "draining", "failed")


class EngineCollector(Collector):
    """`read` gives the latest snapshot, or None while there is no engine."""

    def __init__(self, model_name: Callable[[], str], read: Callable[[], EngineSnapshot | None]):
        self._model_name = model_name
        self._read = read

    def describe(self) -> list[Metric]:
        return []  # nothing is collected at registration

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        if snapshot is None:
            return
        name = self._model_name()
        for metric, help, value in (
            ("num_requests_running", "Requests that are being computed.", snapshot.running),
            ("num_requests_waiting", "Requests that wait for a place.", snapshot.waiting),
            ("kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1.", snapshot.kv_usage),
            ("kv_cache_blocks", "KV-cache blocks there are.", snapshot.blocks),
            ("engine_epoch", "How often the workers were restarted.", snapshot.epoch),
        ):
            gauge = GaugeMetricFamily(PREFIX + metric, help, labels=["model_name"])
            gauge.add_metric([name], float(value))
            yield gauge
        for metric, help, total in (
            ("num_preemptions", "Requests put back into the queue for want of memory.", snapshot.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", snapshot.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", snapshot.prefix_hits),
            ("engine_steps", "Forward passes.", snapshot.steps),
            ("engine_step_seconds", "Time spent in forward passes.", snapshot.step_seconds),
            ("computed_tokens", "Tokens computed, prompt and output.", snapshot.computed_tokens),
        ):
            counter = CounterMetricFamily(PREFIX + metric, help, labels=["model_name"])
            counter.add_metric([name], float(total))
            yield counter
        if snapshot.speculation.accepted_at:
            yield from _of_speculation(name, snapshot.speculation)
        losses = CounterMetricFamily(
            PREFIX + "worker_failures", "Workers and engine processes lost, by kind.", labels=["model_name", "kind"]
        )
        for kind in dict.fromkeys((*KINDS, *snapshot.failures)):
            losses.add_metric([name, kind], float(snapshot.failures.get(kind, 0)))
        yield losses
        state = GaugeMetricFamily(PREFIX + "engine_state", "1 for the engine's state.", labels=["model_name", "state"])
        for known in STATES:
            state.add_metric([name, known], float(snapshot.state == known))
        yield state


def _of_speculation(name: str, counts: SpeculationCounts) -> Iterator[Metric]:
    for metric, help, total in (
        ("drafts", "Times that tokens were proposed for a request.", counts.drafts),
        ("draft_tokens", "Tokens proposed.", counts.draft_tokens),
        ("accepted_tokens", "Proposed tokens that were accepted.", counts.accepted_tokens),
    ):
        counter = CounterMetricFamily(PREFIX + "spec_decode_num_" + metric, help, labels=["model_name"])
        counter.add_metric([name], float(total))
        yield counter
    places = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens, by place among those proposed together.",
        labels=["model_name", "position"],
    )  # fmt: skip
    for place, total in enumerate(counts.accepted_at):
        places.add_metric([name, str(place)], float(total))
    yield places
