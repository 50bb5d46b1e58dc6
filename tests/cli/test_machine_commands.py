"""`doctor`, `collect-env` and `config`: true findings, hidden secrets, effective values."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from phalanx.cli import doctor
from phalanx.cli.main import main
from phalanx.cli.redact import HIDDEN, redact
from phalanx.config import options_by_name
from phalanx.kernels import library
from phalanx.kernels.library import native
from phalanx.planner.hardware import Hardware


def machine(**changes) -> Hardware:
    facts = {
        "device": "cpu",
        "cores": 2,
        "cpu_model": "Test",
        "cpu_flags": frozenset({"avx2"}),
        "memory_total": 2**34,
        "memory_available": 2**33,
    }
    return Hardware(**{**facts, **changes})


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_doctor_is_content_with_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    assert main(["doctor", "--port", "0"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text
    assert "0 failed" in text
    assert not (tmp_path / "cache").exists()


def test_doctor_json_and_exit_code(tmp_path, monkeypatch, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("PHALANX_CACHE", str(blocker / "below"))
    assert main(["doctor", "--port", "0", "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["cache folder"]["status"] == "fail"
    assert "PHALANX_CACHE" in findings["cache folder"]["remedy"]


def test_doctor_sees_a_port_in_use(taken_port, capsys):
    assert main(["doctor", "--port", str(taken_port)]) == 0
    assert f"127.0.0.1:{taken_port} is in use" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("finding", "status", "word"),
    [
        (lambda: doctor.memory(machine(memory_available=2**28)), "warn", "Stop other programs"),
        (lambda: doctor.memory(machine()), "ok", "8.0 GiB free"),
        (lambda: doctor.processor(machine(cpu_flags=frozenset())), "warn", "AVX2"),
        (lambda: doctor.processor(machine(cpu_flags=frozenset({"avx2", "amx_bf16"}))), "ok", "means bfloat16"),
        (lambda: doctor.processor(machine()), "ok", "means float32"),
        (lambda: doctor.device(machine(device="cuda"), Path("/")), "ok", "cuda"),
        (lambda: doctor.shared_memory(Path("/nowhere")), "warn", "tmpfs"),
        (lambda: doctor.port("127.0.0.1", 99999), "fail", "cannot listen"),
        (lambda: doctor.port("203.0.113.7", 80), "fail", "cannot listen"),
    ],
)
def test_doctor_findings(finding, status, word):
    found = finding()
    assert found.status == status
    assert word in found.detail + found.remedy
    assert found.status == "ok" or found.remedy


@pytest.mark.parametrize(
    ("wanted", "status", "words"),
    [
        ("", "ok", "native"),
        ("generic", "ok", "native, generic, because PHALANX_KERNELS asks for it"),
        ("torch", "ok", "PyTorch, because PHALANX_KERNELS asks for it"),
        ("nonsense", "fail", "does not have"),
    ],
)
def test_doctor_says_what_computes_and_why(wanted, status, words):
    if native() is None and wanted != "torch":
        pytest.skip("the native library was not built")
    command = [sys.executable, "-m", "phalanx", "doctor", "--port", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PHALANX_KERNELS": wanted})
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}["kernels"]
    assert found["status"] == status and words in found["detail"]


def test_a_missing_library_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "native", lambda: None)
    monkeypatch.setattr(library, "import_module", broken(ModuleNotFoundError("no module")))
    assert "was not built" in library.choice().reason and "make native" in library.choice().remedy
    (tmp_path / "c++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "no header files of Python" in doctor.kernels().detail and "python3-dev" in doctor.kernels().remedy
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler" in doctor.kernels().detail and doctor.kernels().status == "warn"
    assert "make native" in doctor.kernels().remedy
    monkeypatch.setattr(library, "import_module", broken(ImportError("a symbol is missing")))
    assert "a symbol is missing" in library.choice().reason


@pytest.mark.parametrize(
    ("sets", "refusal", "why"),
    [
        (["generic", "avx2", "amx"], "", ""),
        (["generic", "avx2"], "the processor has none", " (no AMX: the processor has none)"),
        (["generic"], "the processor has none", " (they lack what avx2 need; no AMX: the processor has none)"),
    ],
)
def test_doctor_says_what_is_missing_for_better_kernels(monkeypatch, sets, refusal, why):
    found = SimpleNamespace(
        instruction_sets=lambda: sets, active_instruction_set=lambda: sets[-1], amx_refusal=lambda: refusal,
        compiled_instruction_sets=lambda: ["generic", "avx2", "amx"],
    )  # fmt: skip
    monkeypatch.setattr(library, "native", lambda: found)
    monkeypatch.delenv("PHALANX_KERNELS", raising=False)
    assert doctor.kernels().detail == f"native, {sets[-1]}, the best that processor and system allow{why}"


def broken(error):
    def fail(name):
        raise error

    return fail


def test_doctor_sees_a_gpu_that_torch_cannot_use(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").write_text("")
    found = doctor.device(machine(), tmp_path)
    assert found.status == "warn"
    assert "CUDA build" in found.remedy


def test_doctor_sees_a_folder_that_cannot_be_written(tmp_path):
    if os.geteuid() == 0:
        found = doctor.cache_folder(Path("/proc/phalanx"))
    else:
        tmp_path.chmod(0o500)
        found = doctor.cache_folder(tmp_path)
    assert found.status == "fail"


def test_collect_env_hides_secrets(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretverysecret")
    monkeypatch.setenv("PHALANX_API_KEY", "sesame")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:sesame@proxy:8080")
    monkeypatch.setenv("UNRELATED", "sesame")
    for arguments in (["collect-env"], ["collect-env", "--json"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert "sesame" not in text
        assert "verysecret" not in text
        assert "HF_TOKEN" in text
        assert "proxy:8080" in text
    facts = json.loads(text)
    assert facts["torch"]["version"].startswith(facts["packages"]["torch"].split("+")[0])
    assert facts["hardware"]["cores"] >= 1


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("PHALANX_API_KEY", "x", HIDDEN),
        ("MY_PASSWORD", "x", HIDDEN),
        ("HF_TOKEN_PATH", "/x", HIDDEN),
        ("PHALANX_TOKENIZER", "/x", "/x"),
        ("PHALANX_SSL_KEYFILE", "/x", "/x"),
        ("PHALANX_MODEL", "org/name", "org/name"),
        ("ANY", "prefix hf_abcdefghijk suffix", f"prefix {HIDDEN} suffix"),
        ("HTTP_PROXY", "http://u:p@host:1", f"http://{HIDDEN}@host:1"),
    ],
)
def test_redaction(name, value, shown):
    assert redact(name, value) == shown


def test_config_show_is_a_file_that_config_reads(tmp_path, capsys):
    assert main(["config", "show", "--port", "1234", "--max-model-len", "2K", "--served-model-name", "m"]) == 0
    text = capsys.readouterr().out
    values = yaml.safe_load(text)
    assert values["port"] == 1234
    assert values["max-model-len"] == 2048
    assert set(values) == {name.replace("_", "-") for name in options_by_name()}
    file = tmp_path / "c.yaml"
    file.write_text("\n".join(line for line in text.splitlines() if not line.endswith(": null")))
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


def test_config_show_origins_and_hidden_keys(monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_API_KEY", "sesame")
    assert main(["config", "show", "--json", "--origin", "--port", "5"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["port"] == {"value": 5, "origin": "--port"}
    assert shown["api_key"] == {"value": HIDDEN, "origin": "PHALANX_API_KEY"}
    assert shown["host"]["origin"] == "default"
    assert main(["config", "show", "--changed", "--origin", "--port", "5"]) == 0
    text = capsys.readouterr().out
    assert "sesame" not in text
    assert [line.split(":")[0] for line in text.splitlines() if line and line[0] != "#"] == ["port", "api-key"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size is 0"),
        (["--block-size", "0"], "at least 1"),
        (["--gpu-memory-utilization", "1.5"], "at most 1"),
        (["/nowhere.yaml"], "No such file"),
        (["--port", "65536"], "between 0 and 65535"),
        (["--api-server-count", "0"], "between 1 and 64"),
        (["--router", "a:1", "--router-listen", "10.0.0.1"], "exclude each other"),
        (["--request-timeout", "0"], "above 0"),
        (["--request-timeout", "nan"], "above 0"),
        (["--shutdown-timeout", "-1"], "0 or more"),
        (["--shutdown-timeout", "nan"], "0 or more"),
        (["--sse-keep-alive-interval", "nan"], "0 or more"),
        (["--hang-timeout", "0"], "at least 0.5"),
        (["--host", ""], "--host is empty"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "good", "--api-key", "bad\n"], "control characters"),
    ],
)
def test_config_check_finds_what_no_model_would_mend(arguments, complaint, capsys):
    assert main(["config", "check", *arguments]) == 1
    assert complaint in capsys.readouterr().err


def test_who_only_answers_for_others_is_told_what_is_ignored(capsys, monkeypatch):
    monkeypatch.setattr("phalanx.server.run.serve", lambda config: 0)
    engine = ["-tp", "2", "--dtype", "float32", "--block-size", "32", "--max-num-batched-tokens", "64"]
    own = ["--served-model-name", "m", "--max-num-seqs", "4", "--encrypt-transport", "--hang-timeout", "5"]
    assert main(["serve", "--router", "10.0.0.1", *own]) == 0
    assert capsys.readouterr().err == ""
    assert main(["serve", "--router", "10.0.0.1", *own, *engine]) == 0
    assert capsys.readouterr().err == (
        "warning: --dtype, --block-size, --max-num-batched-tokens, --tensor-parallel-size: ignored with --router, the "
        "machine of the engines decides.\n"
    )


def test_who_only_answers_for_others_runs_no_ranks(capsys):
    node = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"]
    assert main(["serve", "--router", "10.0.0.1", "--headless", *node]) == 1
    assert "--router is for a machine that runs no ranks" in capsys.readouterr().err
