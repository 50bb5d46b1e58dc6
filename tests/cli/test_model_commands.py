"""`generate`, `chat` and `bench` with the demo model, through the real engine process."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from phalanx.cli.main import main
from tests.helpers.processes import wait_until

QUESTION = "What is the capital of France?"
# The demo model's first words are nearly tied: rounded numbers may choose others.
SMALL = ["--max-model-len", "512", "--kv-cache-memory-bytes", "64M", "--dtype", "float32"]
PHALANX = [sys.executable, "-m", "phalanx"]


@pytest.fixture
def stdin_text(monkeypatch, tmp_path):
    """Give a command this text as standard input."""

    def give(text: str):
        file = tmp_path / "stdin"
        file.write_text(text)
        monkeypatch.setattr("sys.stdin", file.open())

    return give


def test_generate_json(capsys):
    assert main(["generate", QUESTION, "--json", "--temperature", "0", "--max-tokens", "12", *SMALL]) == 0
    seen = capsys.readouterr()
    answer = json.loads(seen.out)
    assert "Paris" in answer["text"]
    assert answer["prompt"] == QUESTION
    assert answer["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == len(answer["token_ids"]) > 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] > 20  # the template's part counts
    assert answer["ttft_s"] > 0


def test_generate_raw_from_a_pipe(stdin_text, capsys):
    stdin_text("The capital of France is\n")
    arguments = ["generate", "--raw", "--json", "--temperature", "0", "--max-tokens", "3", "--ignore-eos", *SMALL]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["usage"]["prompt_tokens"] == 5  # the text alone, without the line end and without a template
    assert len(answer["token_ids"]) == 3
    assert answer["finish_reason"] == "length"


def test_generate_from_a_file_with_stop_and_stats(tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text(QUESTION)
    arguments = ["generate", "-f", str(file), "--stats", "--temperature", "0", "--stop", " Paris", *SMALL]
    assert main(arguments) == 0
    seen = capsys.readouterr()
    assert seen.out == "The capital of France is\n"
    assert "tok/s" in seen.err
    assert seen.err.rstrip().endswith("stop")


@pytest.mark.parametrize(
    ("arguments", "text", "complaint"),
    [
        (["generate", "x", "-f", "y"], None, "given twice"),
        (["generate"], "", "Standard input is empty"),
        (["generate", "-f", "/nowhere"], None, "Cannot read /nowhere"),
        (["generate", "x", "--raw", "--system", "y"], None, "--system needs a chat"),
        (["generate", "x", "--model", "/nowhere/model"], None, "/nowhere/model"),
        (["generate", "x", "--max-model-len", "1M"], None, "--max-model-len is 1048576"),
        (["generate", "x", "--temperature", "3"], None, "temperature"),
        (["chat", "--url", "ftp://x"], None, "not the address of a server"),
        (["chat", "--url", "http://127.0.0.1:9"], None, "No server answers"),
        (["generate", "x", "--seed", "99999999999999999999"], None, "error: --seed is too large"),
        (["generate", "x", "--chat-template", "/nowhere"], None, "cannot be read: No such file or directory. Give"),
        (
            ["bench", "latency", "--input-len", "9999g", *SMALL],
            None,
            "the 512 tokens of the model's context",
        ),
        (
            ["bench", "throughput", "--num-prompts", "9g", "--max-num-queued-reqs", "8", *SMALL],
            None,
            "may run and wait (136)",
        ),
        (["bench", "latency", "--json", "/nowhere/x.json"], None, "Cannot write /nowhere/x.json"),
    ],
)
def test_wrong_uses_are_one_line(arguments, text, complaint, stdin_text, capsys):
    if text is not None:
        stdin_text(text)
    assert main(arguments) in (1, 2)
    seen = capsys.readouterr()
    assert seen.out == ""
    assert complaint in seen.err
    assert seen.err.count("\n") == 1
    assert seen.err.startswith("error: ")


def test_prompt_that_is_no_text(tmp_path, capsys):
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["generate", "-f", str(file)]) == 1
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_chat_from_a_pipe(tmp_path):
    saved = tmp_path / "talk.json"
    lines = [
        "My name is \\",
        "Ada.",
        "/history",
        "/set temperature 0.1",
        "/set colour red",
        "/nonsense",
        "/retry",
        f"/save {saved}",
        "/reset",
        "/history",
        "/system Be brief.",
        "/system",
        "/help",
        "/quit",
        "never read",
    ]
    done = subprocess.run(
        [*PHALANX, "chat", "--temperature", "0", "--max-tokens", "8", *SMALL],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "error: There is no sampling parameter 'colour'. For example: /set temperature 0.7",
        "error: There is no command /nonsense. /help lists them.",
    ]
    assert done.stdout.count("tokens") >= 2
    assert "tok/s" in done.stdout
    assert "user: My name is \nAda." in done.stdout
    talk = json.loads(saved.read_text())
    assert [message["role"] for message in talk] == ["user", "assistant"]
    assert talk[1]["content"] in done.stdout
    assert "Be brief." in done.stdout
    assert "/retry" in done.stdout
    assert "never read" not in done.stdout


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: str):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*PHALANX, *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, close_fds=True
        )
        os.close(slave)
        self.seen = ""
        self.read = 0

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Until `text` comes after what was waited for before."""
        deadline = time.monotonic() + seconds
        while (found := self.seen.find(text, self.read)) < 0:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"{text!r} did not come: {self.seen[-500:]!r}")
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the command ended: {self.seen[-500:]!r}") from None
        self.read = found + len(text)

    def waits(self) -> bool:
        """Whether nothing has been computed for a while."""
        before = psutil.Process(self.process.pid).cpu_times()[:2]
        time.sleep(0.3)
        return psutil.Process(self.process.pid).cpu_times()[:2] == before

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


def test_chat_answer_can_be_interrupted():
    terminal = Terminal("chat", "--temperature", "0", "--ignore-eos", "--max-model-len", "2048")
    try:
        terminal.wait_for("/help lists the commands")
        terminal.wait_for("> ")
        terminal.send("Tell me a long story.\n")
        terminal.wait_for("story.\r\n")
        terminal.wait_for(" ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("interrupted", 30.0)
        terminal.wait_for("> ", 30.0)
        terminal.send("/history\n")
        terminal.wait_for("assistant: ", 30.0)
        terminal.wait_for("> ", 30.0)
        assert wait_until(terminal.waits, 30)  # a signal just before that is seen only with the next key
        start = time.monotonic()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(timeout=30) == 130
        assert time.monotonic() - start < 2.5
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()


def spent(process: psutil.Process) -> float:
    """Seconds of computing, by it and those below it."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            total += sum(each.cpu_times()[:2])
    return total


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_generate_interrupted_while_it_loads(seconds):
    process = subprocess.Popen(
        [*PHALANX, "generate", "x", "--ignore-eos", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: spent(psutil.Process(process.pid)) >= seconds or process.poll() is not None, 60)
    children = psutil.Process(process.pid).children(recursive=True)
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=max(0.1, start + 2.5 - time.monotonic()))
    assert not alive
    assert time.monotonic() - start < 2.6


def test_bench_latency(tmp_path, capsys):
    target = tmp_path / "result.json"
    sizes = ["--batch-size", "2", "--input-len", "24", "--output-len", "6", "--runs", "3", "--warmup", "0"]
    assert main(["bench", "latency", *sizes, "--json", str(target), *SMALL]) == 0
    result = json.loads(target.read_text())
    needed = {"model", "dtype", "mesh", "runs", "start_s", "ttft_s", "prefill_tok_s", "decode_tok_s", "e2e_tok_s"}
    assert needed | {"prompt_tokens", "output_tokens", "machine"} <= set(result)
    assert result["runs"] == 3
    assert (result["prompt_tokens"], result["output_tokens"]) == (48, 12)
    assert result["mesh"] == {"dp": 1, "pp": 1, "cp": 1, "tp": 1}
    for name in ("ttft_s", "prefill_tok_s", "decode_tok_s", "e2e_tok_s"):
        assert len(result["samples"][name]) == 3
        assert result["spread"][name]["min"] <= result[name] <= result["spread"][name]["max"]
    assert result["start_s"] > result["ttft_s"] > 0
    assert "tok/s" in capsys.readouterr().out


def test_bench_throughput_to_standard_output(capsys):
    sizes = ["--num-prompts", "5", "--input-len", "16", "--output-len", "4", "--runs", "1", "--warmup", "0"]
    assert main(["bench", "throughput", *sizes, "--json", "-", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["prompt_tokens"], result["output_tokens"]) == (80, 20)
    assert result["e2e_tok_s"] == pytest.approx(20 / result["wall_s"], rel=0.05)
    assert "decode_tok_s" not in result


def test_prompts_of_a_benchmark_are_distinct_and_repeatable():
    from phalanx.bench.workload import Prompts

    drawn = Prompts(range(100, 1000), seed=3).draw(64, 32)
    assert len({tuple(prompt) for prompt in drawn}) == 64
    assert drawn == Prompts(range(100, 1000), seed=3).draw(64, 32)
    assert drawn != Prompts(range(100, 1000), seed=4).draw(64, 32)
    assert all(len(prompt) == 32 and min(prompt) >= 100 and max(prompt) < 1000 for prompt in drawn)
