"""Chat templates that mean harm: each is refused or ended in time, and nothing else is disturbed."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import psutil
import pytest

from phalanx import killable
from phalanx.errors import ConfigError, InvalidRequest, Unavailable
from phalanx.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]

ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['sys'].modules['os'].popen('touch SENTINEL').read() }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ strftime_now.__code__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__.os.system('touch SENTINEL') }}",
    "{{ joiner.__init__.__globals__.os.system('touch SENTINEL') }}",
    "{{ lipsum.__globals__['os'].popen('touch SENTINEL').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
    "{{ dict.__base__ }}",
    "{{ dict.mro() }}",
    "{{ range.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0.__class__}'.format_map({'0': ''}) }}",
    "{{ ('{0.__class__}'|attr('format'))('') }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ ['{0.__class__}'] | map('format', '') | list }}",
    "{{ (['{0.__class__}'] | map(attribute='format') | first)('') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | groupby('__class__') }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | selectattr('__class__') | list }}",
    "{{ [''] | sort(attribute='__class__') }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'content': 'changed'}) }}",
    "{{ messages[0].pop('content') }}",
    "{% set _ = messages.insert(0, 1) %}{{ messages }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ __import__('os') }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ eval('1') }}",
    "{{ config }}{{ request.environ }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ (1).__class__ }}{{ (1.5).__class__ }}{{ none.__class__ }}{{ true.__class__ }}",
    "{{ caller.__globals__ }}{% call raise_exception('x') %}{% endcall %}",
    "{% macro m() %}{{ m.__init__ }}{{ caller }}{% endmacro %}{{ m() }}",
    "{{ loop.__class__ }}{% for x in [1] %}{{ loop._iterable }}{{ loop.__class__ }}{% endfor %}",
    "{{ ''.encode().__class__ }}",
    "{% debug %}",
]


@pytest.fixture
def template_of():
    made: list[ChatTemplate] = []

    def make(source: str, **options) -> ChatTemplate:
        made.append(ChatTemplate(source, {"bos_token": "<s>"}, **options))
        return made[-1]

    yield make
    for template in made:
        template.close()


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out_of_the_sandbox(source, tmp_path, monkeypatch, template_of):
    """Refused, or rendered without anything of Python's insides in the text; and never a file made."""
    monkeypatch.chdir(tmp_path)
    messages = [dict(message) for message in MESSAGES]
    try:
        text = template_of(source).render(messages)
    except (InvalidRequest, ConfigError) as error:
        text = str(error).split(": ")[0]  # the rest may quote a name the template asked for
    for word in ("<class", "<module", "<function", "<built-in", "root:", "subclasses", "0x", "posix", "site-packages"):
        assert word not in text
    assert list(tmp_path.iterdir()) == []
    assert messages == MESSAGES


def test_nothing_secret_is_near_a_template(monkeypatch, template_of):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    template = template_of("x")
    template.start()
    children = psutil.Process().children()
    assert children
    for child in children:
        environment = child.environ()
        assert "hf_secret" not in environment.values()
        assert not {"HF_TOKEN", "HOME", "PATH"} & environment.keys()


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ range(99999) | map('string') | map('replace', '', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa') | join }}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ 'x' * 10 ** 10 ** 10 }}",
    "{{ 7 ** (9 ** 9) }}",
    "{% set n = 9 ** 9 ** 3 %}{{ n ** n }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%s' % ('x' * 10 ** 9) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ 'x'.center(10 ** 9).replace(' ', 'yyyyyyyyyy') }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'a\n' | indent(1000000000) }}",
    "{{ ('a ' * 99999) | wordwrap(1) | length }}{% for i in range(99999) %}{{ ('a' * 9999) | urlize }}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=3) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99999) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'y' * 9999 }}{% endfor %}",
    "{{ (range(99999) | list | batch(1) | list) | sum(start=[]) | length }}",
    "{{ ['a' * 9999] * 9999 | int | tojson }}",
    "{{ range(99999) | random }}" * 30 + "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_and_growing_templates_are_ended(source, template_of):
    template = template_of(source, timeout_s=0.5, max_output=1_000_000)
    before = psutil.Process().memory_info().rss
    started = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        template.render(MESSAGES)
    assert time.monotonic() - started < 15  # half a second of work, and starting a process on a busy machine
    assert len(str(caught.value)) < 1000
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_a_process_cannot_grow_beyond_its_memory(template_of):
    template = template_of(
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ['y' * 99999] %}{% endfor %}"
    )
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            for child in psutil.Process().children():
                try:
                    peak = max(peak, child.memory_info().rss)
                except psutil.Error:
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(InvalidRequest):
            template.render(MESSAGES)
    finally:
        done.set()
        watcher.join()
    assert peak < 800 << 20


def test_others_are_served_while_a_template_is_being_ended(template_of):
    slow = template_of("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", timeout_s=3)
    good = template_of("{{ messages[0].content }}")
    good.start()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            slow.render(MESSAGES)
        except InvalidRequest as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    answered = 0
    while thread.is_alive():
        assert good.render(MESSAGES) == "hi"
        answered += 1
        time.sleep(0.01)
    thread.join()
    assert answered > 20
    assert "longer than the 3 seconds" in str(errors[0])


def test_a_process_that_gets_no_processor_is_not_the_fault_of_the_request(template_of, monkeypatch):
    template = template_of("{{ messages[0].content }}", timeout_s=0.1)
    before = {child.pid for child in psutil.Process().children()}
    template.start()
    (process,) = [child for child in psutil.Process().children() if child.pid not in before]
    process.suspend()
    with monkeypatch.context() as patched:
        patched.setattr(killable, "_WAIT_S", 0.3)
        with pytest.raises(Unavailable) as refused:
            template.render(MESSAGES)
    assert refused.value.retry_after is not None
    assert template.render(MESSAGES) == "hi"


def test_an_ended_process_is_gone(template_of):
    before = {child.pid for child in psutil.Process().children()}
    template = template_of(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", timeout_s=0.3
    )
    with pytest.raises(InvalidRequest):
        template.render(MESSAGES)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_template_process_ends_with_its_parent(tmp_path):
    """Even while it renders an endless template: nothing is left behind when the server is killed."""
    import subprocess
    import sys

    script = tmp_path / "parent.py"
    script.write_text(
        "import threading, time, psutil\n"
        "from phalanx.text.chat_template import ChatTemplate\n"
        "t = ChatTemplate('{{ 1 }}')\n"
        "t.start()\n"
        "print(*[c.pid for c in psutil.Process().children()], flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert children
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in children)


@pytest.mark.parametrize(
    "source",
    [
        "(" * 100_000,
        "{{" + "(" * 50_000,
        "{% if x %}" * 5_000,
        "{{ " + "-" * 50_000 + "1 }}",
        "{{ [" * 3000,
        "{%" * 9999,
    ],
)
def test_deeply_nested_source(source):
    template = None
    with contextlib.suppress(ConfigError, InvalidRequest):
        template = ChatTemplate(source, timeout_s=2)
        assert template.render(MESSAGES) == source
    if template is not None:
        template.close()


def test_the_worker_reads_no_file_but_its_own(template_of):
    template = template_of("x")
    template.start()
    for child in psutil.Process().children():
        assert not [file.path for file in child.open_files() if not file.path.startswith("/dev")]
    assert os.getpid() not in {child.pid for child in psutil.Process().children()}
