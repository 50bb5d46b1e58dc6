from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from phalanx.metrics.counts import Counts, as_metrics, counts, lasting, summed


class Process:
    """What one counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.asked = Counter("asked", "Asked.", ("route",), registry=self.registry)
        self.busy = Gauge("busy", "Busy.", registry=self.registry)
        self.seconds = Histogram("seconds", "Seconds.", registry=self.registry, buckets=(1, 2))

    def text(self, *others: Counts) -> str:
        class Exported:
            def collect(_) -> object:
                return as_metrics(self.registry, summed([counts(self.registry), *others]))

        return generate_latest(Exported()).decode()  # type: ignore[arg-type]


def test_alone_it_is_what_the_registry_says() -> None:
    one = Process()
    one.asked.labels("/a").inc(3)
    one.seconds.observe(1.5)
    assert one.text() == generate_latest(one.registry).decode()


def test_two_add_up_whatever_labels_each_has_seen() -> None:
    one, other = Process(), Process()
    one.asked.labels("/a").inc(3)
    other.asked.labels("/a").inc(2)
    other.asked.labels("/b").inc(7)
    one.busy.set(1)
    other.busy.set(2)
    one.seconds.observe(0.5)
    other.seconds.observe(1.5)
    lines = one.text(counts(other.registry)).splitlines()
    for line in (
        'asked_total{route="/a"} 5.0',
        'asked_total{route="/b"} 7.0',
        "busy 3.0",
        'seconds_bucket{le="1.0"} 1.0',
        'seconds_bucket{le="2.0"} 2.0',
        'seconds_bucket{le="+Inf"} 2.0',
        "seconds_count 2.0",
        "seconds_sum 2.0",
    ):
        assert lines.count(line) == 1, line


def test_what_a_process_has_counted_outlives_it_and_what_it_measured_does_not() -> None:
    one, ended = Process(), Process()
    ended.asked.labels("/a").inc(4)
    ended.busy.set(5)
    left = lasting(counts(ended.registry))
    text = one.text(left)
    assert 'asked_total{route="/a"} 4.0' in text and "busy 0.0" in text


def test_of_beginnings_the_first_counts() -> None:
    one, other = Process(), Process()
    one.asked.labels("/a").inc()
    other.asked.labels("/a").inc()
    both = [counts(process.registry) for process in (one, other)]
    begun = [value for part in both for name, _, value in part["asked"].samples if name == "asked_created"]
    (first,) = [value for name, _, value in summed(both)["asked"].samples if name == "asked_created"]
    assert first == min(begun)
