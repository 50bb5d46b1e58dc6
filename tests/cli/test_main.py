"""The `phalanx` command as a whole: quick help, exit codes, one-line errors."""

import os
import resource
import signal
import subprocess
import sys

import pytest

import phalanx
from phalanx.cli.main import COMMANDS, main
from phalanx.errors import NotEnoughMemory

PHALANX = [sys.executable, "-m", "phalanx"]


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PHALANX, *arguments], capture_output=True, text=True, timeout=60, **options)


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys; from phalanx.cli.main import main; code = main(['--help']);"
        "heavy = {'torch', 'fastapi', 'transformers', 'tokenizers', 'rich', 'numpy', 'yaml'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    took = []
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime)
    assert min(took) < 0.5


def test_characters_that_the_terminal_does_not_have_end_nothing():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    code = "import phalanx.cli.main as m; m.overview = lambda: 'x 北京 é'; raise SystemExit(m.main(['--help']))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "x ?? ?\n", "")
    wrong = run("config", "show", "--device", "北京", env=environment)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


def test_closed_output_is_no_error():
    closed = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m phalanx --help >&- 2>/dev/null"], stdin=subprocess.DEVNULL, timeout=60
    )
    assert closed.returncode == 0
    command = f"exec {sys.executable} -m phalanx config show >&-"
    silent = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60)
    assert (silent.returncode, silent.stderr) == (0, b"")


def test_what_is_opened_gets_no_number_of_a_closed_stream(tmp_path):
    """Processes that are started later write to these numbers, and inherit them."""
    code = (
        "import os, subprocess, sys; from phalanx.cli.main import main; main(['--version']);"
        'look = \'import os, sys; open(sys.argv[1], "w").write(" ".join(map(os.path.realpath, sys.argv[2:])))\';'
        "fds = [f'/proc/self/fd/{n}' for n in range(3)];"
        "subprocess.run([sys.executable, '-c', look, sys.argv[1], *fds], check=True)"
    )
    script = 'exec "$@" <&- >&- 2>&-'
    found = tmp_path / "found"
    subprocess.run(["sh", "-c", script, "sh", sys.executable, "-c", code, str(found)], check=True, timeout=60)
    assert found.read_text().split() == [os.devnull] * 3


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_without_torch(command):
    code = (
        "import sys; from phalanx.cli.main import main\n"
        f"try: code = main([{command!r}, '--help'])\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: phalanx {command} ")


def test_overview_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in text
        assert command.help in text


def test_no_command_shows_the_overview_and_fails(capsys):
    assert main([]) == 2
    assert "usage: phalanx COMMAND" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"phalanx {phalanx.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["sevre"], "Did you mean 'phalanx serve'?"),
        (["collect_evn"], "Did you mean 'phalanx collect-env'?"),
        (["xyzzy"], "lists the commands"),
        (["--frobnicate"], "Unknown flag"),
        (["cluster"], "not in this version"),
        (["serve", "--prot", "80"], "Did you mean --port?"),
        (["serve", "--max-modle-len=4"], "Did you mean --max-model-len?"),
        (["serve", "--tp", "2"], "Did you mean -tp?"),
        (["serve", "one", "two"], "Unexpected argument 'two'"),
        (["serve", "one", "--api-key", "a", "b"], "A flag that takes several values is repeated"),
        (["serve", "--port", "many"], "--port"),
        (["serve", "--dtype", "bf16"], "Choose one of auto, float32, bfloat16, float16."),
        (["serve", "--port"], "expected one argument"),
        (["bench", "speed"], "Use latency, throughput or comm."),
        (["bench", "latency", "--runs", "0"], "at least 1"),
        (["generate", "x", "--temperature", "hot"], "not a number"),
        (["config", "explain"], "config check"),
    ],
)
def test_wrong_command_lines_are_one_line_and_exit_2(arguments, hint, capsys):
    assert main(arguments) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("error: ")
    assert seen.err.count("\n") == 1
    assert hint in seen.err


def test_user_errors_exit_1_without_a_traceback_unless_asked(monkeypatch, capsys):
    def fail(argv):
        raise NotEnoughMemory("The model needs 20 GiB, but 3 GiB are free.", fix="Use a smaller one.")

    monkeypatch.setattr("phalanx.cli.doctor.run", fail)
    assert main(["doctor"]) == 1
    seen = capsys.readouterr().err
    assert seen == "error: The model needs 20 GiB, but 3 GiB are free. Use a smaller one.\n"

    monkeypatch.setenv("PHALANX_DEBUG", "1")
    assert main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.delenv("PHALANX_DEBUG")
    assert main(["doctor", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_several_lines_is_shown_as_one(monkeypatch, capsys):
    def fail(argv):
        raise NotEnoughMemory("one\ntwo")

    monkeypatch.setattr("phalanx.cli.doctor.run", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "error: one two\n"


def test_interrupt_is_quiet_and_exits_130(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.cli.doctor.run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_real_interrupt_at_a_prompt_exits_130():
    child = subprocess.Popen(
        [*PHALANX, "generate", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdin.write("x" * 200_000)  # more than a pipe holds: written once the command reads
    child.stdin.flush()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "")


def test_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*PHALANX, "config", "show"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


def test_os_errors_name_the_file(capsys):
    assert main(["generate", "--file", "/nowhere/prompt.txt"]) == 1
    assert capsys.readouterr().err == "error: Cannot read /nowhere/prompt.txt: No such file or directory.\n"
