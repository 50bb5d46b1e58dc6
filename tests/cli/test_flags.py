"""Flags, variables and files: every option reachable each way, the order of precedence, and helpful errors."""

import dataclasses

import pytest

from phalanx.cli.flags import SECTIONS, Parser, from_file, from_variables, settings
from phalanx.cli.messages import UsageError
from phalanx.config import EngineConfig, options_by_name
from phalanx.errors import ConfigError
from phalanx.vllm_options import IGNORED, REFUSED

OPTIONS = options_by_name()


def parse(*argv: str, variables: dict[str, str] | None = None):
    return settings(Parser("serve", "", positional=True), argv, variables or {})


def value_of(config: EngineConfig, name: str):
    return getattr(getattr(config, OPTIONS[name][0]), name)


SAMPLES: dict[str, tuple[str, object]] = {
    "tensor_split": ("3,1", "3,1"),
    "pipeline_split": ("20,10", "20,10"),
    "pipeline_tensor_sizes": ("2,1", "2,1"),
    "worker_resources": ("fast=1.5", ("fast=1.5",)),
    "worker_labels": ("zone=a", ("zone=a",)),
    "router": ("10.0.0.1", "10.0.0.1:29600"),
    "router_listen": ("10.0.0.2:80", "10.0.0.2:80"),
    "speculative_config": (
        '{"method": "ngram", "num_speculative_tokens": 3}',
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 5}',
    ),
}
"""Options with a form of their own."""


def sample(declared: dataclasses.Field) -> tuple[str, object]:
    """A text other than the default, and the value that it means."""
    kind = str(declared.type).removesuffix(" | None")
    if declared.metadata["choices"]:
        other = next(choice for choice in declared.metadata["choices"] if choice != declared.default)
        return other, other
    if declared.name in SAMPLES:
        return SAMPLES[declared.name]
    if declared.metadata["parse"]:
        return "3K", 3072
    return {"int": ("7", 7), "float": ("0.5", 0.5), "str": ("text", "text")}.get(kind, ("text", ("text",)))


def test_sections_are_those_of_the_configuration():
    assert list(SECTIONS) == [field.name for field in dataclasses.fields(EngineConfig)]


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_can_be_set_by_flag_variable_and_file(name, tmp_path):
    _, declared = OPTIONS[name]
    if declared.type == "bool":
        text, value = str(not declared.default).lower(), not declared.default
        flag = ["--" + ("" if value else "no-") + name.replace("_", "-")]
    else:
        text, value = sample(declared)
        flag = ["--" + name.replace("_", "-"), text]
    file = tmp_path / "c.yaml"
    file.write_text(f"{name.replace('_', '-')}: {text}\n")
    assert value_of(parse(*flag).config, name) == value
    assert value_of(parse(variables={name: text}).config, name) == value
    assert value_of(parse("--config", str(file)).config, name) == value
    assert value_of(parse().config, name) == value_of(EngineConfig(), name)
    # Underscores are accepted too.
    assert value_of(parse("--" + flag[0][2:].replace("-", "_"), *flag[1:]).config, name) == value


def test_aliases_come_from_the_declarations():
    assert parse("-tp", "3").config.parallel.tensor_parallel_size == 3
    assert parse("-q", "int8").config.model.quantization == "int8"


def test_precedence_flag_variable_file_default(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nhost: file\nmax_num_seqs: 9\n")
    chosen = parse("--config", str(file), "--port", "3", variables={"port": "2", "host": "variable"})
    assert chosen.config.server.port == 3
    assert chosen.config.server.host == "variable"
    assert chosen.config.scheduler.max_num_seqs == 9
    assert chosen.config.cache.block_size == 16
    assert chosen.origins["port"] == "--port"
    assert chosen.origins["host"] == "PHALANX_HOST"
    assert chosen.origins["max_num_seqs"] == str(file)
    assert chosen.origins["block_size"] == "default"


def test_a_flag_set_to_its_default_still_wins(tmp_path):
    chosen = parse("--port", "8000", variables={"port": "2"})
    assert chosen.config.server.port == 8000


def test_the_file_can_be_named_by_a_variable(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 77\n")
    assert parse(variables={"config": str(file)}).config.server.port == 77


def test_model_is_an_argument_or_a_flag():
    assert parse("some/model").config.model.model == "some/model"
    assert parse("--model", "some/model").config.model.model == "some/model"
    with pytest.raises(UsageError, match="given twice"):
        parse("some/model", "--model", "other")


def test_repeated_flags_and_commas_make_several_values():
    assert parse("--api-key", "a", "--api-key", "b").config.server.api_key == ("a", "b")
    assert parse(variables={"api_key": "a, b"}).config.server.api_key == ("a", "b")


def test_values_may_hold_underscores_and_equals_signs():
    assert parse("--served-model-name=my_model=1").config.model.served_model_name == ("my_model=1",)


def test_unknown_variables_warn_and_suggest(capsys):
    assert from_variables({"prot": "1", "cache": "/x", "debug": "1", "kernels": "torch"}) == {}
    assert capsys.readouterr().err == (
        "warning: PHALANX_PROT is not an option and has no effect. Did you mean PHALANX_PORT?\n"
    )


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("port", "x", " is 'x', which is not an integer."),
        ("port", "9" * 30, " is too large."),
        ("dtype", "bf16", " is 'bf16'."),
        ("enable_recovery", "maybe", " is 'maybe'."),
        ("max_model_len", "x", ": 'x' is not a size."),
        ("speculative_config", "x", " is not valid JSON."),
        ("speculative_config", '{"method": "ngram", "num_speculative_tokens": 0}', ": num_speculative_tokens must be"),
    ],
)
def test_an_option_is_named_once_as_where_it_was_set(name, text, complaint, tmp_path):
    flag, file = "--" + name.replace("_", "-"), tmp_path / "c.yaml"
    file.write_text(f"{flag[2:]}: '{text}'\n")
    ways = [
        (f"{file}: {flag[2:]}", lambda: from_file(str(file))),
        (f"PHALANX_{name.upper()}", lambda: from_variables({name: text})),
    ]
    if name != "enable_recovery":
        ways.append((flag, lambda: parse(flag, text)))
    for named, read in ways:
        with pytest.raises(ConfigError) as caught:
            read()
        assert caught.value.message.startswith(named + complaint)


def test_a_short_flag_glued_to_its_value_is_told_apart():
    with pytest.raises(UsageError, match=r"Unknown flag -tp2\. Did you mean -tp 2\?"):
        parse("-tp2")


@pytest.mark.parametrize("flag", ["--served-model-name", "--api-key"])
def test_a_second_value_is_not_taken_for_the_model(flag, tmp_path):
    """A key was looked for on the hub."""
    with pytest.raises(UsageError) as caught:
        parse(flag, "one", "two")
    assert flag in str(caught.value)
    assert "two" not in str(caught.value)
    assert parse("two", flag, "one").config.model.model == "two"
    assert parse(f"{flag}=one", "two").config.model.model == "two"
    assert parse(flag, "one", str(tmp_path)).config.model.model == str(tmp_path)


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_a_context_as_long_as_fits_is_not_here_and_says_so(text):
    with pytest.raises(UsageError, match=r"not in this version.*Leave it out"):
        parse("--max-model-len", text)


def test_a_bad_variable_names_itself():
    with pytest.raises(ConfigError, match=r"^PHALANX_PORT is 'many', which is not an integer"):
        parse(variables={"port": "many"})
    with pytest.raises(ConfigError, match=r"^PHALANX_FAULT has 'zzz', which is no fault"):
        parse(variables={"fault": "zzz"})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("prot: 1\n", r"unknown option 'prot'\. Did you mean 'port'\?"),
        ("port: many\n", r"not an integer"),
        ("port: [1]\n", r"must be int"),
        ("api-key: 1\n", r"api-key must be a list of strings"),
        ("port: true\n", r"must be int"),
        ("server:\n  port: 1\n", r"unknown option 'server'"),
        ("model:\n  name: x\n", r"holds a mapping"),
        ("- port\n", r"name: value"),
        ("port: 1\n  host: x\n", r"line 2 is not valid YAML"),
        ("max-model-len: 1\nmax_model_len: 2\n", r"given twice"),
        ("port: 1\nport: 2\n", r"'port' is given twice"),
        ("!!python/object/apply:os.system ['true']\n", r"not valid YAML"),
        ("\x00", r"not valid YAML"),
        ("[" * 5000, r"not valid YAML"),
    ],
)
def test_bad_files_are_one_clear_error(content, complaint, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        from_file(str(file))
    assert str(file) in str(caught.value)


def test_missing_folder_and_huge_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        from_file(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="Is a directory"):
        from_file(str(tmp_path))
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        from_file(str(huge))


def test_an_empty_file_sets_nothing(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("# nothing\n")
    assert from_file(str(file)) == {}


def test_keys_of_vllm_in_a_file_are_answered_as_its_flags(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("enforce-eager: true\nswap_space: 4\nport: 5\n")
    assert from_file(str(file)) == {"port": 5}
    assert capsys.readouterr().err == (
        f"warning: {file}: enforce-eager is ignored: {IGNORED['--enforce-eager'][1]}\n"
        f"warning: {file}: swap_space is ignored: {IGNORED['--swap-space'][1]}\n"
    )
    file.write_text("enable-lora: true\n")
    with pytest.raises(ConfigError) as caught:
        from_file(str(file))
    assert str(caught.value) == f"{file}: enable-lora is not in this version: {REFUSED['--enable-lora']}"


@pytest.mark.parametrize("flag", sorted(IGNORED))
def test_known_flags_that_change_nothing_are_accepted_with_a_line(flag, capsys):
    takes_value, reason = IGNORED[flag]
    chosen = parse("some/model", flag, *(["1"] if takes_value else []), "--port", "5")
    assert chosen.config.model.model == "some/model"
    assert chosen.config.server.port == 5
    assert capsys.readouterr().err == f"warning: {flag} is ignored: {reason}\n"


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_known_flags_that_we_lack_are_refused_in_a_sentence(flag):
    for argv in ([flag, "1"], [flag.replace("-", "_").replace("__", "--", 1) if flag[:2] == "--" else flag]):
        with pytest.raises(UsageError, match="is not in this version") as caught:
            parse(*argv)
        assert REFUSED[flag] in str(caught.value)


def test_no_flag_is_in_two_tables_or_shadows_an_option():
    ours = {flag for action in Parser("serve", "", positional=True)._actions for flag in action.option_strings}
    assert not set(REFUSED) & ours
    assert not set(REFUSED) & set(IGNORED)
    options = {"--" + name.replace("_", "-") for name in OPTIONS}
    assert not set(IGNORED) & options


def test_help_shows_every_option_with_its_default():
    text = " ".join(Parser("serve", "", positional=True).format_help().split())
    for name, (_, declared) in OPTIONS.items():
        assert "--" + name.replace("_", "-") in text
        assert " ".join(declared.metadata["help"].split())[:30] in text
    assert "[8000]" in text
    assert "--enforce-eager" not in text
