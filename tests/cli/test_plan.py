"""`phalanx plan` and `phalanx serve --dry-run`: the classic case on paper, on this machine, and what is refused."""

import json
import re
import socket
import subprocess
import sys

import pytest

from phalanx.cli.main import main
from phalanx.kernels.library import native
from tests.helpers.planning import QWEN_14B
from tests.helpers.tiny_models import tiny_checkpoint

A10 = ["--declare-device", "name=a10,memory=24G"]
TWO = ["--declare-device", "name=a10,memory=24G,count=2"]


@pytest.fixture(params=[["serve", "--dry-run"], ["plan"]], ids=" ".join)
def command(request) -> list[str]:
    return [*request.param, str(QWEN_14B)]


def shown(arguments, capsys) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(arguments, capsys, code: int = 1) -> str:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


def test_one_a10_is_too_small(command, capsys):
    text = refused([*command, *A10], capsys)
    for number in ("33.1 GiB", "26.4 GiB", "21.6 GiB", "11.5 GiB", "-tp 2 or -pp 2"):
        assert number in text


@pytest.mark.parametrize("layout", [["-tp", "2"], ["-pp", "2"], []])
def test_two_are_enough(command, layout, capsys):
    text = shown([*command, *TWO, *layout], capsys)
    assert re.search(r"^GPU KV cache size: 20,848 tokens", text, re.MULTILINE)
    assert re.search(r"^Maximum concurrency for 8,192 tokens per request: 2.54x$", text, re.MULTILINE)
    assert len(re.findall(r"^ +\d +- +a10 .*13\.2 GiB +8\.0 GiB", text, re.MULTILINE)) == 2
    assert "Binding device: rank" in text
    assert "Model: qwen-14b-chat (bfloat16 on cuda, planned only)" in text


def test_three_unequal_cards_from_a_file(command, capsys, tmp_path):
    file = tmp_path / "cards.yaml"
    file.write_text("- {name: large, memory: 32G}\n- {name: small, memory: 20G, count: 2}\n")
    text = shown([*command, "--declare-device", str(file)], capsys)
    used = re.search(r"([\d.]+)% of the 64.8 GiB that they and activations may take", text)
    assert float(used[1]) >= 95
    assert "Considered:" in text
    assert re.search(r"^Layout: 3 workers", text, re.MULTILINE)


@pytest.mark.skipif(native() is None, reason="without the native library nothing is rounded to int8")
def test_weights_to_be_rounded_are_counted_so(command, capsys):
    """`--quantization` was left out of account where no weights were looked at."""
    cards = ["--declare-device", "name=x,memory=40G,count=2", "--device", "cpu", "-tp", "2"]
    assert re.search(r"^ +0 +- +x +0-40 +20 +13\.2 GiB", shown([*command, *cards], capsys), re.MULTILINE)
    assert re.search(r"^ +0 +- +x +0-40 +20 +6\.6 GiB", shown([*command, *cards, "-q", "int8"], capsys), re.MULTILINE)
    assert "can only be used as none or int8" in refused([*command, *cards, "-q", "awq"], capsys)


def test_a_quantised_model_without_weights_is_planned_as_numbers_and_says_so(capsys, caplog, tmp_path):
    config = json.loads((QWEN_14B / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "13.2 GiB" in shown(["plan", str(tmp_path), *TWO, "-tp", "2"], capsys)
    assert f"How much of {tmp_path.name} is awq only its weights tell: planned as numbers." in caplog.text


def test_devices_may_come_from_a_variable(monkeypatch, capsys):
    monkeypatch.setenv("PHALANX_DECLARE_DEVICE", "name=a10,memory=24G,count=2")
    assert "20,848 tokens" in shown(["plan", str(QWEN_14B), "-tp", "2"], capsys)


def test_a_tokenizer_of_its_own_must_be_there(command, capsys, tmp_path):
    assert "There is no file or folder '/nowhere/else'" in refused([*command, "--tokenizer", "/nowhere/else"], capsys)
    assert f"There is no tokenizer in {tmp_path}" in refused([*command, "--tokenizer", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--scheduling-policy", "none-such"], "--scheduling-policy is 'none-such'"),
        (["--routing-policy", "none-such"], "--routing-policy is 'none-such'"),
        (["--transport", "none-such"], "--transport is 'none-such'"),
        (["--chat-template", "/nowhere.jinja"], "The chat template '/nowhere.jinja' cannot be read"),
        (["--chat-template", "{% if"], "The chat template has a syntax error"),
    ],
)
def test_what_is_named_must_be_there(command, arguments, complaint, capsys):
    assert complaint in refused([*command, *TWO, *arguments], capsys)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--host", "192.0.2.1"], "192.0.2.1 is not an address of this machine"),
        (["--port", "65536"], "between 0 and 65535"),
        (["--ssl-keyfile", "key.pem"], "TLS needs a key and a certificate"),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"], "Node 1 cannot serve"),
        (["--router", "10.0.0.1"], "--router runs no engine"),
    ],
)
def test_a_dry_run_refuses_what_a_start_would(arguments, complaint, capsys):
    assert complaint in refused(["serve", str(QWEN_14B), "--dry-run", *TWO, "-tp", "2", *arguments], capsys)


def test_a_dry_run_does_not_mind_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "20,848 tokens" in shown(["serve", str(QWEN_14B), "--dry-run", *TWO, "--port", port], capsys)


def test_a_missing_gpu_is_all_there_is_to_say(capsys, caplog, monkeypatch):
    monkeypatch.setattr("phalanx.worker.capacity.gpus", lambda: [])
    assert "no GPU here" in refused(["plan", "--device", "cuda"], capsys)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-tp", "4"], "has 4 workers (tp 4), but there are only 2 device"),
        (["-tp", "41"], "41 workers"),
        (["-pp", "2", "--pipeline-split", "20,19"], "does not share 40 layers over 2 stages"),
        (["-pp", "2", "--pipeline-split", "10,10,20"], "names 3 stages, but there are 2"),
        (["-tp", "2", "--tensor-split", "1,2,3"], "does not name a share for each of 2 tensor ranks"),
        (["-tp", "2", "--max-model-len", "9k"], "made for at most 8192"),
        (["-cp", "2"], "context parallelism is not in this version"),
    ],
)
def test_layouts_that_cannot_be(arguments, complaint, capsys):
    assert complaint in refused(["plan", str(QWEN_14B), *TWO, *arguments], capsys)


def test_more_ranks_than_heads_or_layers(capsys):
    many = ["--declare-device", "name=a10,memory=24G,count=64"]
    assert "41 tensor ranks cannot share 40 attention heads" in refused(
        ["plan", str(QWEN_14B), *many, "-tp", "41"], capsys
    )
    assert "41 pipeline stages cannot share 40 layers" in refused(["plan", str(QWEN_14B), *many, "-pp", "41"], capsys)


def test_a_wrong_device_is_one_line(capsys):
    assert "no memory" in refused(["plan", str(QWEN_14B), "--declare-device", "name=a10"], capsys)


def test_this_machine_is_planned_for_without_devices(capsys):
    folder = tiny_checkpoint("llama")
    text = shown(["plan", str(folder), "-tp", "2", "--kv-cache-memory-bytes", "1M", "--device", "cpu"], capsys)
    assert "CPU KV cache size" in text
    assert re.search(r"^Layout: 2 workers \(tp 2\)$", text, re.MULTILINE)


def test_several_nodes_must_be_described(capsys):
    nodes = ["--nnodes", "2", "--master-addr", "10.0.0.1", "-tp", "2"]
    assert "--declare-device" in refused(["plan", str(tiny_checkpoint("llama")), *nodes], capsys)
    assert "20,848 tokens" in shown(["plan", str(QWEN_14B), *TWO, *nodes], capsys)


def test_a_folder_without_weights_is_enough_only_for_a_plan(capsys, tmp_path):
    (tmp_path / "config.json").write_text((QWEN_14B / "config.json").read_text())
    assert "20,848 tokens" in shown(["plan", str(tmp_path), *TWO, "-tp", "2"], capsys)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing-known"}))
    assert "not supported" in refused(["plan", str(tmp_path), *TWO], capsys)
    (tmp_path / "config.json").unlink()
    assert "holds no model" in refused(["plan", str(tmp_path), *TWO], capsys)


def test_a_plan_imports_no_torch():
    code = (
        "import sys; from phalanx.cli.main import main; "
        f"assert main(['plan', {str(QWEN_14B)!r}, *{TWO!r}]) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
