"""The configuration: declarations, types, sizes, and the one place where automatic values are decided."""

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import EngineConfig, options_by_name, parse_size, resolve
from phalanx.errors import ConfigError
from phalanx.vllm_options import IGNORED, REFUSED


@dataclass(frozen=True)
class Spec:
    max_positions: int = 2048
    checkpoint_dtype: str = "bfloat16"


@dataclass(frozen=True)
class Machine:
    device: str = "cpu"
    native_bfloat16: bool = True


def resolved(spec: Spec = Spec(), machine: Machine = Machine(), **options) -> EngineConfig:
    return resolve(EngineConfig.from_options(**options), spec, machine)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("2G", 2 * 2**30),
        ("2GiB", 2 * 2**30),
        ("1.5g", 1_500_000_000),
        (" 3 m ", 3_000_000),
        ("1T", 2**40),
        ("0", 0),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1x", "1e3", "1.", "0x10", "1kk", "1 2", "nan", "١x"])
def test_what_is_not_a_size(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 2**70))
def test_any_whole_number_is_a_size_exactly(number):
    assert parse_size(str(number)) == number
    assert parse_size(f"{number}K") == number * 1024


def test_every_option_is_declared_with_help_and_a_good_default():
    assert len(options_by_name()) == sum(
        len(dataclasses.fields(field.default_factory())) for field in dataclasses.fields(EngineConfig)
    ), "two sections share an option's name"
    for name, (section, declared) in options_by_name().items():
        assert declared.metadata["help"].endswith("."), name
        default = getattr(getattr(EngineConfig(), section), name)
        assert not declared.metadata["choices"] or default is None or default in declared.metadata["choices"]
        rebuilt = EngineConfig.from_options(**{name: default})
        assert rebuilt == EngineConfig()


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().server.port = 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_modle_len": 1}, "Did you mean 'max_model_len'?"),
        ({"zzzz": 1}, "Unknown option 'zzzz'"),
        ({"port": "many"}, "not an integer"),
        ({"port": True}, "must be int"),
        ({"port": 1.5}, "must be int"),
        ({"port": None}, "needs a value"),
        ({"dtype": "bf16"}, "Choose one of"),
        ({"enable_prefix_caching": "maybe"}, "Write true or false"),
        ({"enable_prefix_caching": 1}, "must be bool"),
        ({"request_timeout": "soon"}, "not a number"),
        ({"seed": 2**64}, "too large"),
        ({"seed": "-99999999999999999999"}, "too small"),
        ({"max_body_bytes": "9999999999T"}, "too large"),
        ({"max_body_bytes": "9" * 5000}, "not a size"),
        ({"gpu_memory_utilization": 10**400}, "too large"),
        ({"api_key": [1]}, "list of strings"),
        ({"model": 3}, "must be str"),
    ],
)
def test_wrong_options_are_config_errors(options, complaint):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**options)
    assert complaint in str(caught.value)


def test_values_are_taken_as_text_or_as_what_they_are():
    assert EngineConfig.from_options(port="80").server.port == 80
    assert EngineConfig.from_options(request_timeout=5).server.request_timeout == 5.0
    assert EngineConfig.from_options(max_model_len="4K").model.max_model_len == 4096
    assert EngineConfig.from_options(enable_prefix_caching="off").cache.enable_prefix_caching is False
    assert EngineConfig.from_options(api_key="one").server.api_key == ("one",)
    assert EngineConfig.from_options(api_key=["one", "two"]).server.api_key == ("one", "two")
    assert EngineConfig.from_options(max_model_len=None).model.max_model_len is None


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_other_names_of_types(name, dtype):
    assert EngineConfig.from_options(dtype=name).model.dtype == dtype


def test_without_the_models_sampling_defaults_by_vllms_name():
    assert EngineConfig.from_options(generation_config="vllm").model.generation_config == "none"


@pytest.mark.parametrize(
    ("options", "spec", "machine", "dtype"),
    [
        ({}, Spec(), Machine(), "bfloat16"),
        ({}, Spec(), Machine(native_bfloat16=False), "float32"),
        ({}, Spec(), Machine("cuda", False), "bfloat16"),
        ({}, Spec(checkpoint_dtype="float32"), Machine(), "float32"),
        ({}, Spec(checkpoint_dtype="quantized"), Machine(), "bfloat16"),
        ({"dtype": "float16"}, Spec(), Machine(), "float16"),
        ({"device": "cpu"}, Spec(), Machine("cuda", False), "float32"),
    ],
)
def test_automatic_dtype(options, spec, machine, dtype):
    config = resolved(spec, machine, **options)
    assert config.model.dtype == dtype
    assert config.cache.kv_cache_dtype == dtype


def test_resolving_leaves_nothing_automatic_and_the_original_alone():
    config = EngineConfig.from_options(kv_cache_dtype="float32")
    result = resolve(config, Spec(), Machine())
    assert (result.model.device, result.model.max_model_len) == ("cpu", 2048)
    assert result.cache.kv_cache_dtype == "float32"
    assert result.parallel.distributed_executor_backend == "inprocess"
    assert config.model.device == "auto"
    assert resolve(result, Spec(), Machine()) == result


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is 0"),
        ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size is 0"),
        ({"data_parallel_size": 0}, "--data-parallel-size is 0"),
        ({"data_parallel_size": 1000}, "at most 64 replicas"),
        ({"data_parallel_size": 2, "device": "cuda"}, "replicas run on CPUs"),
        ({"data_parallel_size": 2, "nnodes": 3, "master_addr": "10.0.0.1"}, "cannot be shared out"),
        ({"data_parallel_size": 4, "nnodes": 2, "master_addr": "10.0.0.1"}, "cannot be shared out"),
        ({"data_parallel_size": 2, "nnodes": 4, "master_addr": "10.0.0.1"}, "2 nodes cannot share 1 rank"),
        (
            {"data_parallel_size": 8, "nnodes": 8, "master_addr": "10.0.0.1", "master_port": 65530},
            "8 replicas need as many ports",
        ),
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        ({"distributed_executor_backend": "inprocess", "tensor_parallel_size": 2}, "Use mp"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"max_num_seqs": -1}, "--max-num-seqs"),
        ({"max_num_seqs": 70000}, "65535"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_model_len": 4096}, "at most 2048"),
        ({"gpu_memory_utilization": 0.0}, "above 0"),
        ({"gpu_memory_utilization": float("nan")}, "above 0"),
        ({"hang_timeout": 0.0}, "--hang-timeout is 0; it must be at least 0.5"),
        ({"hang_timeout": float("nan")}, "--hang-timeout is nan"),
        ({"replacement_timeout": -1.0}, "--replacement-timeout is -1; it must be at least 0"),
        ({"recovery_timeout": float("nan")}, "--recovery-timeout is nan"),
    ],
)
def test_what_cannot_be(options, complaint):
    with pytest.raises(ConfigError) as caught:
        resolved(**options)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tensor_split", " 3, 1.5 ", "3,1.5"),
        ("tensor_split", "2,1;1", "2,1;1"),
        ("tensor_split", "auto", "auto"),
        ("pipeline_split", "20, 10", "20,10"),
        ("pipeline_tensor_sizes", "2,1", "2,1"),
        ("worker_resources", "fast=0.5", ("fast=0.5",)),
        ("worker_labels", ["zone=a", "disk=ssd"], ("zone=a", "disk=ssd")),
    ],
)
def test_layout_options(name, text, value):
    assert getattr(EngineConfig.from_options(**{name: text}).parallel, name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("tensor_split", text) for text in ("", "0,1", "a,b", "1,,2", "-1,1", "1;", "1e9,1", "nan,1", "١,1")],
        *[("pipeline_split", text) for text in ("", "0,1", "1.5,2", "20;10", "-1")],
        *[("pipeline_tensor_sizes", text) for text in ("", "0", "auto", "2,x")],
        *[("worker_resources", text) for text in ("fast", "=1", "fast=0", "fast=x", "fast=-1")],
        *[("worker_labels", text) for text in ("zone", "zone=", "=a")],
        ("placement_strategy", "RANDOM"),
    ],
)
def test_layout_options_that_cannot_be_read(name, text):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**{name: text})
    assert caught.value.fix


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"nnodes": 0}, "--nnodes is 0"),
        ({"nnodes": 2, "node_rank": 2}, "numbered from 0 to 1"),
        ({"node_rank": 1}, "--nnodes 1"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "--master-addr"),
        ({"nnodes": 3, "tensor_parallel_size": 2, "master_addr": "a"}, "3 nodes cannot share 2"),
        ({"master_port": 0}, "--master-port is 0"),
        ({"master_port": 65536}, "--master-port is 65536"),
        ({"headless": True}, "--headless"),
        ({"num_cpus_per_worker": -1.0}, "--num-cpus-per-worker is -1"),
        ({"num_gpus_per_worker": float("nan")}, "--num-gpus-per-worker is nan"),
        ({"tensor_split": "1,2"}, "each of 1 tensor ranks"),
        ({"tensor_parallel_size": 2, "tensor_split": "1,2;1"}, "each of 2 tensor ranks"),
        ({"pipeline_tensor_sizes": "2,1", "tensor_split": "1,2"}, "each of 2 and 1 tensor ranks in each of 2 stages"),
        ({"pipeline_split": "1,2"}, "names 2 stages, but there are 1"),
        ({"pipeline_tensor_sizes": "2,1", "tensor_parallel_size": 3}, "--tensor-parallel-size is 3"),
        ({"pipeline_tensor_sizes": "2,1", "pipeline_parallel_size": 3}, "--pipeline-parallel-size is 3"),
    ],
)
def test_layouts_that_cannot_be(options, complaint):
    with pytest.raises(ConfigError) as caught:
        resolved(**options)
    assert complaint in str(caught.value)


def test_sizes_splits_and_the_executor_of_a_layout():
    wide = resolved(pipeline_tensor_sizes="2,1", tensor_split="3,1;1", pipeline_split="20,10").parallel
    assert (wide.widths, wide.world_size) == ((2, 1), 3)
    assert (wide.pipeline_parallel_size, wide.tensor_parallel_size) == (2, 2)
    assert wide.tensor_weights == ((3.0, 1.0), (1.0,))
    assert wide.stage_layers == (20, 10)
    assert wide.distributed_executor_backend == "mp"
    same = resolved(pipeline_tensor_sizes="2,2", tensor_split="3,1").parallel
    assert (same.pipeline_tensor_sizes, same.widths) == (None, (2, 2))
    assert same.tensor_weights == ((3.0, 1.0), (3.0, 1.0))
    assert resolved(distributed_executor_backend="mp").parallel.distributed_executor_backend == "mp"
    assert resolved(tensor_parallel_size=2, distributed_executor_backend="ray").parallel.world_size == 2


@pytest.mark.parametrize(("replicas", "node", "wanted"), [(1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 1, 1), (2, 2, 1)])
def test_which_replica_a_node_asks(replicas, node, wanted):
    """One beyond the two that are configured too: the last one turns it away, or has it stand in for a lost one."""
    config = EngineConfig.from_options(
        nnodes=2, node_rank=node, data_parallel_size=replicas, master_addr="10.0.0.1", distributed_executor_backend="mp"
    )
    assert config.parallel.replica_here == wanted


LONG = {flag: flag[2:].replace("-", "_") for flag in [*IGNORED, *REFUSED] if flag.startswith("--")}


@pytest.mark.parametrize("flag", sorted(IGNORED.keys() & LONG))
def test_options_of_vllm_that_change_nothing_are_taken_with_a_line(flag, caplog):
    assert EngineConfig.from_options(**{LONG[flag]: True}, port=5).server.port == 5
    assert caplog.messages == [f"{LONG[flag]} is ignored: {IGNORED[flag][1]}"]


@pytest.mark.parametrize("flag", sorted(REFUSED.keys() & LONG))
def test_options_of_vllm_that_we_lack_are_refused_in_a_sentence(flag):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**{LONG[flag]: True})
    assert str(caught.value) == f"{LONG[flag]} is not in this version: {REFUSED[flag]}"


def test_what_an_option_of_vllm_asks_for_decides(caplog):
    EngineConfig.from_options(enable_lora=False, cpu_offload_gb=0, hf_overrides=None, enforce_eager=False)
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "enable_lora is ignored",
        "cpu_offload_gb is ignored",
        "hf_overrides is ignored",
        "enforce_eager is ignored",
    ]
    with pytest.raises(ConfigError, match="enable_chunked_prefill is not in this version"):
        EngineConfig.from_options(enable_chunked_prefill=False)
