"""What is asked while faults happen, chosen so that a lost, repeated or swapped token shows; and the oracle.

Between them the asks need everything that a request carries over a loss: greedy and seeded draws, penalties, a stop
string, logprobs, several choices, a schema, characters of several tokens, and prompts of many tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.helpers.history import Answer, assemble, tells
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client, Serving

LETTERS = "äöüßéñçøþ€漢字語😀🚀"
LONG = " ".join(f"hello world {i} stop the" for i in range(9))
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 30},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 10, "maxItems": 12},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "numbers", "ok"],
    "additionalProperties": False,
}
ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "hello", "temperature": 0},
    "logprobs": {"prompt": "the world", "temperature": 0, "logprobs": 2},
    "seeded": {"prompt": "stop", "temperature": 1.0, "top_p": 0.95, "seed": 11, "logprobs": 0},
    "penalties": {
        "prompt": "hello the",
        "temperature": 0.8,
        "seed": 5,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "several": {"prompt": "world", "temperature": 1.0, "seed": 3, "n": 2},
    "schema": {"prompt": "{", "temperature": 1.0, "seed": 8, "structured_outputs": {"json": _SCHEMA}},
    "characters": {
        "prompt": "ä",
        "temperature": 1.0,
        "seed": 2,
        "structured_outputs": {"regex": f"[{LETTERS}]{{45,50}}"},
    },
    "long": {"prompt": LONG, "temperature": 0.9, "seed": 4, "max_tokens": 60},
}
TOKENS = 150


def body(name: str, **more: Any) -> dict[str, Any]:
    made = {"max_tokens": TOKENS, "ignore_eos": True, **ASKS[name], **more}
    if "structured_outputs" in made:
        del made["ignore_eos"]
    return made


class Oracle:
    """The answers of an undisturbed server, by ask. "stop" is an ask made of the greedy one: it ends at a string from
    the middle of that answer."""

    def __init__(self, serving: Serving, names: Iterable[str] = tuple(ASKS)):
        self.bodies: dict[str, Mapping[str, Any]] = {name: body(name) for name in names}
        self.answers: dict[str, Answer] = {}
        for name in self.bodies:
            self.answers[name] = self._ask(serving, name)
        if "seeded" in self.answers:
            tokens = self.answers["seeded"].choices[0].text
            stop = tokens[len(tokens) // 2 :][:3]
            self.bodies["stop"] = {**body("seeded"), "stop": [stop]}
            self.answers["stop"] = self._ask(serving, "stop")

    def _ask(self, serving: Serving, name: str) -> Answer:
        client = Client(serving, name, self.bodies[name])
        client.join(60)
        answer = assemble(client.saw)
        wrong = [*answer.complaints, *answer.errors, client.saw.broken, "" if client.saw.accepted else client.saw.body]
        assert not any(wrong), f"the undisturbed answer to {name}: {wrong}"
        assert tells(answer) or name == "stop", f"the answer to {name} would hide a lost token: {answer}"
        return answer

    def ask(self, serving: Serving, name: str) -> Client:
        return Client(serving, name, self.bodies[name])

    def ask_all(self, serving: Serving) -> list[Client]:
        return [self.ask(serving, name) for name in self.bodies]


def tokens_seen(clients: Iterable[Client]) -> int:
    return sum(len(client.saw.events) for client in clients)


def wait_for_events(clients: list[Client], wanted: int, seconds: float = 60.0) -> bool:
    """Whether the clients have had so many events together, while some go on."""
    wait_until(lambda: tokens_seen(clients) >= wanted or not any(map(Client.is_alive, clients)), seconds)
    return tokens_seen(clients) >= wanted and any(map(Client.is_alive, clients))


def show(answer: Answer) -> str:
    return json.dumps({str(i): choice.text for i, choice in answer.choices.items()}, ensure_ascii=False)
