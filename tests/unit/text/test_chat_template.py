"""Rendering of chat templates: as transformers does it, and clear answers when it cannot be done."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from phalanx.checkpoint.locate import locate
from phalanx.errors import ConfigError, InvalidRequest
from phalanx.text.chat_template import ChatTemplate, flatten_content, load_source
from phalanx.text.qwen_tiktoken import CHATML
from phalanx.text.tokenizer import load_tokenizer

TEMPLATES = {
    "qwen-1": CHATML,
    "demo": load_tokenizer(locate(None)).chat_template,
    "llama 3": """{{- bos_token }}
{%- set date = strftime_now("%Y") if strftime_now is defined else "2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nYear: " + date + "\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{ tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "mistral": """{% if messages[0]['role'] == 'system' %}
{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{{ bos_token }}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + (system_message ~ '\n\n' if loop.last and system_message else '') }}
{{- message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles!') }}
{% endif %}{% endfor %}""",
    "gemma": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "qwen 3": """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not (message.content or '').startswith('<r>') %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {%- generation %}{{- content }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- elif loop.index0 > ns.last %}{% continue %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n</think>\\n' }}{%- endif %}{%- endif %}
""",
    "odds and ends": "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{% for k, v in dict(a=1, b=2).items() %}"
    "{{ k }}={{ v }}{% break %}{% endfor %}{{ [1, 2] | join(',') }}{{ 'é<&>' | tojson }}"
    "{{ {'b': 1, 'a': None} | tojson(sort_keys=true) }}{{ messages | map(attribute='role') | list }}{{ 'x'.upper() }}"
    "{{ '%05d' % 7 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ 7 % 4 }}"
    "{{ messages[0].content[:3] }}{{ undefined_thing }}\n{{ [3, 1] | sort | first }}\n",
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Wetter für <Ort> & Tag",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln"}}}
CONVERSATIONS = {
    "short": [{"role": "user", "content": "Hi"}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Grüße 👍🏽\n\n<b> & \"q\" 'r'"},
    ],
    "empty system": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "long": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c {{ not.a.template }} {% nor this %}"},
    ],
    "tools": [
        {"role": "user", "content": "Wetter?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "12 °C", "tool_call_id": "1"},
    ],
}


@pytest.fixture(scope="module")
def reference():
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    return made


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_renders_as_transformers_does(name, reference):
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    rendered = 0
    for messages in CONVERSATIONS.values():
        for options in [
            {},
            {"add_generation_prompt": False},
            {"tools": TOOLS},
            {"enable_thinking": False},
        ]:
            options = {"add_generation_prompt": True} | options
            try:
                expected = reference.apply_chat_template(
                    messages, chat_template=TEMPLATES[name], tokenize=False, **options
                )
            except Exception:
                with pytest.raises(InvalidRequest):
                    ours.render(messages, **options)
                continue
            assert ours.render(messages, **options) == expected
            rendered += 1
    assert rendered >= 8
    ours.close()


def test_a_template_refuses_messages_in_its_own_words():
    template = ChatTemplate(TEMPLATES["mistral"], {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render([{"role": "assistant", "content": "first"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert template.render([{"role": "user", "content": "still works"}])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": 3}],
        [],
    ],
)
def test_messages_a_template_trips_over(messages):
    template = ChatTemplate(CHATML)
    with contextlib.suppress(InvalidRequest):  # what it makes of them is its business, but it answers
        assert isinstance(template.render(messages), str)
    assert template.render([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_says_what_to_do():
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        ChatTemplate(None).render([{"role": "user", "content": "x"}])
    assert "--chat-template" in caught.value.fix


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ a", "{% for x in y %}", "{% nosuch %}", "{{ '" + "a" * 2_000_000 + "' }}"]
)
def test_a_template_that_is_none(source):
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_things_that_are_not_json():
    template = ChatTemplate("x")
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    for value in (object(), {1, 2}, b"x", nested):
        with pytest.raises(InvalidRequest):
            template.render([{"role": "user", "content": value}])


def test_lone_surrogates_pass_through():
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "a\ud800"}]) == "a\ud800"


def test_variables_of_the_request_cannot_replace_the_messages():
    template = ChatTemplate("{{ messages[0].content }}{{ extra }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render([{"content": "m"}], extra="e") == "me<s>"


def test_special_tokens_that_a_request_names_do_count_as_given():
    """The server decides which names a request may use."""
    assert ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}).render([], bos_token="B") == "B"


def test_many_threads_render_at_the_same_time():
    template = ChatTemplate(CHATML)
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        texts[number] = template.render([{"role": "user", "content": f"n{number}"}])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"n{n}<" in texts[n] for n in range(16))


def _children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process(os.getpid()).children()}


def test_close_leaves_no_process():
    before = _children()
    template = ChatTemplate("x")
    template.start()
    assert _children() - before
    template.close()
    template.close()
    assert not _children() - before


def test_a_process_that_was_killed_is_replaced():
    import psutil

    before = _children()
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"content": "a"}]) == "a"
    for pid in _children() - before:
        psutil.Process(pid).kill()
    assert template.render([{"content": "b"}]) == "b"


def test_where_the_template_comes_from(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("T{{ x }}")
    assert load_source(None, "own") == "own"
    assert load_source(None, None) is None
    assert load_source(str(path), "own") == "T{{ x }}"
    assert load_source("{{ messages }}", "own") == "{{ messages }}"
    for bad in (str(tmp_path / "missing"), str(tmp_path), "name\0x"):
        with pytest.raises(ConfigError, match="chat template"):
            load_source(bad, "own")


def test_content_in_parts():
    assert flatten_content(None) is None
    assert flatten_content("text") == "text"
    assert flatten_content([]) == ""
    assert flatten_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    for bad in (
        [{"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "text"}],
        [{"type": "text", "text": 3}],
        [{}],
        [3],
        {"type": "text", "text": "a"},
        7,
    ):
        with pytest.raises(InvalidRequest):
            flatten_content(bad)
