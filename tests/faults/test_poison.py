"""A request that ends a rank each time it is computed is refused alone; those beside it have their answers."""

from __future__ import annotations

import contextlib

import httpx
import pytest

from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.days import Day, check, under_way

(DEADLY,) = byte_tokenizer().encode("X")
"""In no other prompt."""


class Deadly(Day):
    """Its fault waits for no file."""

    def _faults(self) -> str:
        return self._own


@pytest.mark.recovery
@pytest.mark.parametrize(
    ("layout", "at"), [("tp2", "step"), pytest.param("pp2", "computed", marks=pytest.mark.slow)]
)  # fmt: skip
def test_who_ends_a_rank_each_time_is_refused_alone(tiny_model: str, layout: str, at: str) -> None:
    with contextlib.closing(Deadly(tiny_model, layout, f"at={at},rank=1,prompt={DEADLY},do=kill")) as place:
        oracle, clients = under_way(place, "greedy", "seeded")
        serving = place.open(ask=False)
        body = {"prompt": "hello X", "max_tokens": 20, "ignore_eos": True}
        refused = httpx.post(f"http://127.0.0.1:{serving.port}/v1/completions", json=body, timeout=60)
        assert refused.status_code == 500, refused.text
        assert refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["code"] == "poison_request"
        assert all(client.is_alive() for client in clients), "nobody was beside it to the end"
        check(place, oracle, clients)
        status = serving.status()
        assert status["failures"] == {"killed": 3}  # twice beside the others, once alone
        assert {(each["rank"], each["kind"]) for each in status["recoveries"]} == {(1, "killed")}
