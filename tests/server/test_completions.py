"""POST /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.server import EchoServer, demo_tokenizer, echo_server, events


async def test_an_answer_has_openai_s_shape(server: EchoServer) -> None:
    body = (await server.complete()).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "one two threeone", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 4


async def test_sixteen_tokens_by_default(server: EchoServer) -> None:
    assert (await server.complete(max_tokens=None)).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_lists_of_prompts_and_choices_are_numbered(server: EchoServer, stream: bool) -> None:
    answer = await server.complete(prompt=["one two", "alpha beta"], n=2, max_tokens=2, stream=stream)
    texts = [""] * 4
    if stream:
        for chunk in events(answer.text)[:-1]:
            for choice in json.loads(chunk)["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert answer.json()["usage"]["completion_tokens"] == 8
    assert texts == ["one two", "one two", "alpha beta", "alpha beta"]


async def test_token_ids_as_prompt(server: EchoServer) -> None:
    ids = demo_tokenizer().encode("one two")
    assert (await server.complete(prompt=ids, max_tokens=2)).json()["choices"][0]["text"] == "one two"
    many = await server.complete(prompt=[ids, ids[:1]], max_tokens=1)
    assert [choice["text"] for choice in many.json()["choices"]] == ["one", "one"]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(server: EchoServer, stream: bool) -> None:
    answer = await server.complete(echo=True, max_tokens=2, stream=stream)
    if stream:
        text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in events(answer.text)[:-1])
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == "one two threeone two"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(server: EchoServer, stream: bool) -> None:
    answer = await server.complete(echo=True, max_tokens=2, logprobs=1, stream=stream)
    if stream:
        pieces = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in events(answer.text)[:-1]]
        logprobs = {key: [item for piece in pieces for item in piece[key]] for key in pieces[0]}
    else:
        logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["one", " two", " three", "one", " two"]
    assert logprobs["token_logprobs"] == [None, 0.0, 0.0, 0.0, 0.0]
    assert logprobs["text_offset"] == [0, 3, 7, 13, 16]
    assert logprobs["top_logprobs"][1] == {" two": 0.0}


async def test_scoring_without_generating(server: EchoServer) -> None:
    body = (await server.complete(echo=True, max_tokens=0, logprobs=1)).json()
    assert body["choices"][0]["text"] == "one two three"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["tokens"] == ["one", " two", " three"]
    assert body["usage"]["completion_tokens"] == 0
    assert (await server.complete(max_tokens=0)).status_code == 400


async def test_logprobs_offsets_follow_the_text(server: EchoServer) -> None:
    answer = await server.complete(logprobs=0, stream=True, max_tokens=3)
    pieces = [json.loads(chunk)["choices"][0]["logprobs"] for chunk in events(answer.text)[:-1]]
    assert [offset for piece in pieces for offset in piece["text_offset"]] == [0, 3, 7]


async def test_prompt_logprobs(server: EchoServer) -> None:
    choice = (await server.complete(prompt_logprobs=0)).json()["choices"][0]
    assert [None if entry is None else len(entry) for entry in choice["prompt_logprobs"]] == [None, 1, 1]
    streamed = await server.complete(prompt_logprobs=0, stream=True)
    found = [json.loads(chunk)["choices"][0].get("prompt_logprobs") for chunk in events(streamed.text)[:-1]]
    assert sum(item is not None for item in found) == 1


async def test_truncated_prompts(server: EchoServer) -> None:
    body = (await server.complete(truncate_prompt_tokens=2, max_tokens=2)).json()
    assert body["usage"]["prompt_tokens"] == 2
    assert body["choices"][0]["text"] == " two three"
    assert (await server.complete(prompt="word " * 9000, max_tokens=4)).status_code == 400
    body = (await server.complete(prompt="word " * 9000, truncate_prompt_tokens=-1, max_tokens=4)).json()
    assert body["usage"]["total_tokens"] == 4096


@pytest.mark.parametrize(
    "prompt", ["", [], None, 5, True, [1, "a"], [[]], [[1], []], [[1, "a"]], [1.5], [True], {"a": 1}, [[[1]]]]
)
async def test_bad_prompts(server: EchoServer, prompt: Any) -> None:
    answer = await server.complete(prompt=prompt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, 49152, 2**31, 2**63, 10**400])
async def test_token_ids_outside_the_vocabulary(server: EchoServer, token: int) -> None:
    for fields in ({"prompt": [token]}, {"stop_token_ids": [token]}, {"allowed_token_ids": [token]}):
        assert (await server.complete(**fields)).status_code == 400, fields
    assert (await server.complete(logit_bias={str(token): 1})).status_code == 400
    answer = await server.client.post("/detokenize", json={"tokens": [token]})
    assert answer.status_code == 400


async def test_too_many_prompts(server: EchoServer) -> None:
    answer = await server.complete(prompt=["a"] * 129)
    assert answer.status_code == 400
    assert "--max-prompts" in answer.json()["error"]["message"]
    assert server.echo.requests == []


async def test_one_bad_prompt_refuses_all_and_leaves_nothing_running(server: EchoServer) -> None:
    answer = await server.complete(prompt=["good", "word " * 9000, "good"])
    assert answer.status_code == 400
    assert server.echo.status().running == 0


async def test_echo_logprobs_n_streaming_is_refused(server: EchoServer) -> None:
    assert (await server.complete(echo=True, logprobs=1, n=2, stream=True)).status_code == 400


async def test_tokenize_and_back(server: EchoServer) -> None:
    text = "Grüße, 世界! 🚀"
    body = (await server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert body["tokens"] == demo_tokenizer().encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 4096
    back = await server.client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": text}


async def test_tokenize_messages_as_chat_would(server: EchoServer) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    await server.chat(messages=messages)
    body = (await server.client.post("/tokenize", json={"messages": messages})).json()
    assert body["tokens"] == server.echo.requests[-1].prompt_token_ids


async def test_tokenize_needs_exactly_one_input(server: EchoServer) -> None:
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        assert (await server.client.post("/tokenize", json=body)).status_code == 400


async def test_long_texts_are_tokenised_too(server: EchoServer) -> None:
    body = (await server.client.post("/tokenize", json={"prompt": "word " * 50_000})).json()
    assert body["count"] > 40_000
    back = await server.client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json()["prompt"] == "word " * 50_000


@pytest.mark.parametrize("wanted", [{"n": 12}, {"prompt": ["one"] * 12}, {"n": 3, "prompt": ["one"] * 4}])
async def test_more_answers_than_there_can_be_places_are_not_worth_another_try(wanted: dict[str, Any]) -> None:
    async with echo_server(max_num_queued_reqs=8, max_num_seqs=3) as small:
        refused = await small.complete(**wanted)
        assert refused.status_code == 400
        assert "asks for 12 answers; this server has places for 11" in refused.json()["error"]["message"]
        assert (await small.complete(n=11)).status_code == 200
