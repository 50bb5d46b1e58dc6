"""POST /v1/chat/completions over an engine that repeats the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.server import EchoServer, demo_tokenizer, echo_server, events


def echoed(server: EchoServer, count: int) -> str:
    """What the engine answers to the last request: its prompt's first tokens."""
    return demo_tokenizer().decode(server.echo.requests[-1].prompt_token_ids[:count])


async def test_an_answer_has_openai_s_shape(server: EchoServer) -> None:
    answer = await server.chat(max_tokens=6)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "echo"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": echoed(server, 6), "refusal": None}
    assert choice["finish_reason"] == "length"
    prompt = len(server.echo.requests[-1].prompt_token_ids)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 6, prompt + 6)


async def test_the_prompt_is_the_rendered_template_without_doubled_special_tokens(server: EchoServer) -> None:
    await server.chat(messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    text = demo_tokenizer().decode(server.echo.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


async def test_developer_and_text_parts_are_understood(server: EchoServer) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    await server.chat(messages=[{"role": "developer", "content": "S"}, {"role": "user", "content": parts}])
    text = demo_tokenizer().decode(server.echo.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>system\nS<|im_end|>" in text
    assert "<|im_start|>user\nA\nB<|im_end|>" in text


async def test_the_final_message_can_be_continued(server: EchoServer) -> None:
    messages = [{"role": "user", "content": "Name a fruit."}, {"role": "assistant", "content": "It is called an "}]
    await server.chat(messages=messages, continue_final_message=True)
    text = demo_tokenizer().decode(server.echo.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nIt is called an")
    both = await server.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400


async def test_without_generation_prompt(server: EchoServer) -> None:
    await server.chat(add_generation_prompt=False)
    text = demo_tokenizer().decode(server.echo.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert not text.endswith("assistant\n")


async def test_streaming(server: EchoServer) -> None:
    answer = await server.chat(stream=True, max_tokens=6)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in parsed)
    assert len({chunk["id"] for chunk in parsed}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in parsed]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == echoed(server, 6)
    assert [chunk["choices"][0]["finish_reason"] for chunk in parsed][-1] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in parsed[:-1])


async def test_stream_usage_in_a_last_chunk_of_its_own(server: EchoServer) -> None:
    answer = await server.chat(stream=True, max_tokens=3, stream_options={"include_usage": True})
    parsed = [json.loads(chunk) for chunk in events(answer.text)[:-1]]
    assert all(chunk["usage"] is None for chunk in parsed[:-1])
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] == 3


async def test_stream_usage_in_every_chunk(server: EchoServer) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    answer = await server.chat(stream=True, max_tokens=3, stream_options=options)
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in events(answer.text)[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices(server: EchoServer, stream: bool) -> None:
    answer = await server.chat(n=3, stream=stream, max_tokens=3)
    if not stream:
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in choices]
        assert answer.json()["usage"]["completion_tokens"] == 9
    else:
        texts = ["", "", ""]
        for chunk in events(answer.text)[:-1]:
            for choice in json.loads(chunk)["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [echoed(server, 3)] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(server: EchoServer, stream: bool) -> None:
    answer = await server.chat(logprobs=True, top_logprobs=1, stream=stream, max_tokens=3)
    if stream:
        chunks = [json.loads(chunk)["choices"][0] for chunk in events(answer.text)[:-1]]
        content = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    else:
        content = answer.json()["choices"][0]["logprobs"]["content"]
    tokens = server.echo.requests[-1].prompt_token_ids[:3]
    assert [entry["token"] for entry in content] == [demo_tokenizer().token_text(token) for token in tokens]
    assert all(
        bytes(entry["bytes"]) == entry["token"].encode() and len(entry["top_logprobs"]) == 1 for entry in content
    )


async def test_logprobs_without_alternatives_and_not_at_all(server: EchoServer) -> None:
    content = (await server.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)
    assert (await server.chat()).json()["choices"][0]["logprobs"] is None
    assert (await server.chat(top_logprobs=2)).status_code == 400


async def test_prompt_logprobs(server: EchoServer) -> None:
    listed = (await server.chat(prompt_logprobs=1)).json()["prompt_logprobs"]
    tokens = server.echo.requests[-1].prompt_token_ids
    assert len(listed) == len(tokens)
    assert listed[0] is None
    assert listed[1][str(tokens[1])]["rank"] == 1


async def test_max_tokens_by_either_name(server: EchoServer) -> None:
    assert (await server.chat(max_tokens=None, max_completion_tokens=2)).json()["usage"]["completion_tokens"] == 2
    assert (await server.chat(max_tokens=2, max_completion_tokens=2)).status_code == 200
    assert (await server.chat(max_tokens=2, max_completion_tokens=3)).status_code == 400


async def test_without_max_tokens_the_context_is_the_limit() -> None:
    async with echo_server(echo={"max_model_len": 64}) as server:
        body = (await server.chat(max_tokens=None, ignore_eos=True)).json()
        assert body["usage"]["total_tokens"] == 64


async def test_a_stop_string_ends_the_answer(server: EchoServer) -> None:
    choice = (await server.chat(max_tokens=20, stop=["helpful"])).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "helpful")
    assert "helpful" not in choice["message"]["content"]
    choice = (await server.chat(max_tokens=20, stop="helpful", include_stop_str_in_output=True)).json()["choices"][0]
    assert choice["message"]["content"].endswith("helpful")


async def test_every_sampling_field_reaches_the_engine(server: EchoServer) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 5,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 1,
        "skip_special_tokens": False,
        "bad_words": ["foo"],
        "allowed_token_ids": [1, 2],
        "logit_bias": {"3": -5},
        "n": 1,
    }
    assert (await server.chat(**fields, priority=3, cache_salt="s")).status_code == 200
    request = server.echo.requests[-1]
    sampling = request.sampling
    assert sampling.logit_bias == {3: -5}
    assert sampling.stop_token_ids == (9,)
    assert sampling.allowed_token_ids == (1, 2)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "min_tokens",
        "ignore_eos",
        "skip_special_tokens",
    ):
        assert getattr(sampling, name) == fields[name], name
    assert (request.priority, request.cache_salt) == (3, "s")
    assert request.bad_words_token_ids


async def test_structured_outputs_by_either_way(server: EchoServer) -> None:
    schema = {"type": "object"}
    await server.chat(response_format={"type": "json_object"})
    assert server.echo.requests[-1].sampling.structured_outputs.json_object
    await server.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    given = server.echo.requests[-1].sampling.structured_outputs.json
    assert (json.loads(given) if isinstance(given, str) else given) == schema
    await server.chat(structured_outputs={"choice": ["yes", "no"]})
    assert server.echo.requests[-1].sampling.structured_outputs.choice == ("yes", "no")
    await server.chat(response_format={"type": "text"})
    assert server.echo.requests[-1].sampling.structured_outputs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"structured_outputs": {"regex": "("}},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"functions": [{}]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"1": True}},
        {"metadata": {"k": "v" * 600}},
        {"cache_salt": ""},
        {"request_id": "a\nb"},
        {"suffix": "x"},
        {"guided_json": {}},
        {"chat_template": "{{ messages }}"},
        {"store": True},
    ],
)
async def test_refused_with_400_and_without_reaching_the_engine(server: EchoServer, fields: dict[str, Any]) -> None:
    answer = await server.chat(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert server.echo.requests == []


async def test_harmless_values_of_unsupported_fields_are_accepted(server: EchoServer) -> None:
    answer = await server.chat(tool_choice="none", tools=[{"type": "function"}], store=False, modalities=["text"])
    assert answer.status_code == 200


async def test_unknown_fields_are_ignored_with_one_warning(
    server: EchoServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert (await server.chat(sparkle=1)).status_code == 200
    assert sum("sparkle" in record.getMessage() for record in caplog.records) == 1
    for number in range(1000):
        server.state.unknown_fields.warn({f"x{number}": 1})
    assert len(caplog.records) < 300


async def test_context_length_text(server: EchoServer) -> None:
    answer = await server.chat(max_tokens=5000)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "This model's maximum context length is 4096 tokens." in error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_unknown_model(server: EchoServer) -> None:
    answer = await server.chat(model="gpt-4")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert (await server.chat(model="echo")).status_code == 200


async def test_served_model_names() -> None:
    async with echo_server(served_model_name=("first", "second/name")) as server:
        assert (await server.chat(model="second/name")).json()["model"] == "second/name"
        assert (await server.chat()).json()["model"] == "first"
        assert [card["id"] for card in (await server.client.get("/v1/models")).json()["data"]] == [
            "first",
            "second/name",
        ]
        assert (await server.client.get("/v1/models/second/name")).json()["id"] == "second/name"
        assert (await server.client.get("/v1/models/third")).status_code == 404


async def test_template_variables_reach_the_template() -> None:
    source = "{{ messages[0]['content'] }} {{ mood }}"
    async with echo_server(chat_template=source) as server:
        await server.chat(chat_template_kwargs={"mood": "gay"})
        assert demo_tokenizer().decode(server.echo.requests[-1].prompt_token_ids) == "Hello there gay"


async def test_a_model_without_a_template_says_so() -> None:
    async with echo_server(chat_template="{{ raise_exception('no thanks') }}") as server:
        answer = await server.chat()
        assert answer.status_code == 400
        assert "no thanks" in answer.json()["error"]["message"]


async def test_request_id_names_the_answer(server: EchoServer) -> None:
    answer = await server.chat(request_id="my id/1")
    assert answer.headers["x-request-id"] == "my id/1"
    assert answer.json()["id"] == "chatcmpl-my_id_1"
    again = await server.chat(request_id="my id/1")  # equal ids are the client's affair, not a conflict
    assert again.status_code == 200
