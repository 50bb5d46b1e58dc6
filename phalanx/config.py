"""Everything a user can set, as frozen dataclasses; each option is declared once, with its help text.

Command-line flags, `PHALANX_…` variables, YAML keys and docs/configuration.md are made from these declarations
(`phalanx.cli.flags`). `resolve` replaces every automatic value once and returns a new object; what is only known at
run time is not configuration.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from phalanx import layout_rules
from phalanx.errors import ConfigError
from phalanx.layout_texts import (
    parse_address,
    parse_label,
    parse_pipeline_split,
    parse_resource,
    parse_tensor_split,
    parse_widths,
)
from phalanx.speculative_config import SpeculativeConfig, parse_speculative_config, read_speculative_config
from phalanx.vllm_options import without_ignored

if TYPE_CHECKING:
    from collections.abc import Callable


def option(
    default: Any,
    help: str,
    *flags: str,
    choices: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    metavar: str = "",
    positional: bool = False,
    secret: bool = False,
) -> Any:
    """One option. The flag is the field's name in kebab case; `flags` adds aliases such as `-tp`. `parse` turns text
    into the value (of a text option: into its normal form) and raises ConfigError; `metavar` is what help shows for the
    value; a tuple default makes the flag repeatable."""
    metadata = {
        "help": help,
        "flags": flags,
        "choices": choices,
        "parse": parse,
        "metavar": metavar,
        "positional": positional,
        "secret": secret,
    }
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """`4096`, `1k` = 1000, `1K` = 1024, `2G` = 2 GiB, `1.5g`. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,200}(?:\.\d+)?)\s*([kmgtKMGT]?)(?:i?[bB])?", text.strip())
    if not match:
        raise ConfigError(
            f"'{text}' is not a size.", fix="Write a number with an optional k, m, g, K, M or G: 4096, 32k, 2G."
        )
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def _parse_context(text: str) -> int:
    """As `parse_size`. Raises ConfigError."""
    if text.strip().lower() in ("auto", "-1"):  # vLLM: as much as fits
        why = f"'{text}' is not in this version: the length is not chosen by what fits."
        raise ConfigError(why, fix="Leave it out for the model's own; if that does not fit, the error says what does.")
    return parse_size(text)


@dataclass(frozen=True)
class ModelConfig:
    model: str | None = option(
        None,
        "Model to serve: a folder, a .gguf file or a Hugging Face id. Without one, the demo model.",
        positional=True,
    )
    tokenizer: str | None = option(None, "Folder or Hugging Face id of the tokenizer, when it is not the model's own.")
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.")
    served_model_name: tuple[str, ...] = option(
        (), "Name(s) that requests use for the model. The first one is reported."
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations. `half` and `float` mean float16 and float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
        parse=lambda name: {"half": "float16", "float": "float32"}.get(name, name),
    )
    quantization: str | None = option(
        None,
        "How weights are kept: `gguf`, `gptq`, `awq`, `compressed-tensors` (as in the file), `int8` (rounded while "
        "loading) or `none` (as numbers). Default: as the checkpoint has them; numbers with --dtype float32.",
        "-q",
    )
    load_format: str = option(
        "auto",
        "`auto` reads safetensors or GGUF files, `safetensors` no others; `dummy` fills the weights with random "
        "numbers, without reading them.",
        choices=("auto", "safetensors", "dummy"),
    )
    max_model_len: int | None = option(
        None, "Longest context (prompt and answer) in tokens. Default: the model's own.", parse=_parse_context
    )
    chat_template: str | None = option(None, "Jinja chat template: a file, or the template itself in one line.")
    generation_config: str = option(
        "auto",
        "`auto` takes sampling defaults from the model's generation_config.json; `none`, or `vllm`, does not.",
        choices=("auto", "none"),
        parse=lambda name: "none" if name == "vllm" else name,
    )
    seed: int | None = option(None, "Seed of the draws for requests that bring none. Default: random.")
    device: str = option("auto", "Where to run.", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = option(16, "Tokens per KV-cache block.")
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache, such as 2G. Default: from free memory.", parse=parse_size
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's memory to use. Default: 0.9 of a GPU; on a CPU the KV cache takes at most a quarter of "
        "the free memory.",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Type of the KV cache; auto is the model's.",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV cache of equal prompt beginnings.")


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = option(128, "Requests that run at the same time.")
    max_num_batched_tokens: int = option(
        2048, "Tokens computed in one step; longer prompts are computed in chunks.", parse=parse_size
    )
    max_num_queued_reqs: int = option(1024, "Requests that may wait; more are refused with 503.")
    scheduling_policy: str = option(
        "fair",
        "Who waiting goes next among equal priorities: `fair` between API keys, `fcfs` (or `priority`) in order of "
        "arrival, or what an installed package supplies.",
    )
    speculative_config: str | None = option(
        None,
        "Compute tokens that are likely to come next beside those that have come, as JSON: "
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2} proposes up '
        "to 4 that followed the latest 2 to 4 tokens before. Answers stay the same.",
        parse=parse_speculative_config,
        metavar="JSON",
    )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return None if self.speculative_config is None else read_speculative_config(self.speculative_config)

    @property
    def max_num_sampled(self) -> int:
        """Most tokens sampled in one step."""
        return self.max_num_seqs + (self.speculation.num_speculative_tokens if self.speculation else 0)


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = option(1, "Ranks that share every layer.", "-tp")
    pipeline_parallel_size: int = option(1, "Stages of consecutive layers.", "-pp")
    data_parallel_size: int = option(
        1,
        "Replicas of the whole model behind one server. They share this machine's cores and memory; with --nnodes each "
        "has nodes of its own; with Ray each is placed by itself.",
        "-dp",
    )
    routing_policy: str = option(
        "prefix",
        "Which replica gets a request: `prefix` prefers one that knows its beginning, `least-work` the least busy, or "
        "what an installed package supplies.",
    )
    context_parallel_size: int = option(1, "Ranks that share every context; more than 1 is not in this version.", "-cp")
    tensor_split: str = option(
        "auto",
        "Share of each tensor rank, such as 3,1; `2,1;1` names them for each pipeline stage. auto: by the devices' "
        "free memory and speed.",
        parse=parse_tensor_split,
        metavar="SHARES",
    )
    pipeline_split: str = option(
        "auto",
        "Layers of each pipeline stage, such as 20,10. auto: so that the slowest stage is fastest and all fit.",
        parse=parse_pipeline_split,
        metavar="LAYERS",
    )
    pipeline_tensor_sizes: str | None = option(
        None,
        "Tensor ranks of each pipeline stage where they differ, such as 2,1. Sets -pp and -tp.",
        parse=parse_widths,
        metavar="RANKS",
    )
    distributed_executor_backend: str | None = option(
        None, "How ranks are started. Default: chosen by the layout.", choices=("inprocess", "mp", "ray")
    )
    nnodes: int = option(
        1, "Machines that share the model, or its replicas. Start Phalanx on each, unless Ray places the ranks."
    )
    node_rank: int = option(0, "Which of the --nnodes machines this is; 0 serves.")
    master_addr: str | None = option(None, "Address of node 0.")
    master_port: int = option(29500, "Port of node 0 where the other nodes join; those of further replicas follow it.")
    headless: bool = option(False, "Only run ranks for node 0; no server.")
    transport_key: str | None = option(
        None, "Secret that all nodes share and prove to each other. Set it as PHALANX_TRANSPORT_KEY.", secret=True
    )
    transport: str = option(
        "auto",
        "How ranks exchange tensors: `auto` by where they are, `packed` also sends large ones between nodes as 8-bit "
        "integers, for slow links, or what an installed package supplies.",
    )
    encrypt_transport: bool = option(False, "Encrypt what travels between nodes.")
    placement_strategy: str = option(
        "PACK",
        "How Ray spreads ranks over nodes.",
        choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    )
    worker_resources: tuple[str, ...] = option(
        (), "Custom Ray resource that each rank takes.", parse=parse_resource, metavar="NAME=AMOUNT"
    )
    worker_labels: tuple[str, ...] = option(
        (), "Label that a Ray node must have to get ranks.", parse=parse_label, metavar="KEY=VALUE"
    )
    num_cpus_per_worker: float | None = option(None, "CPUs that each rank takes from Ray; fractions allowed.")
    num_gpus_per_worker: float | None = option(None, "GPUs that each rank takes from Ray; fractions allowed.")
    declare_device: tuple[str, ...] = option(
        (),
        "A device to plan for, in rank order: name=a10,memory=24G and, where known, speed=600g (bytes per second), "
        "used=40% or used=2G, node=NAME, count=2; or a YAML file of such entries.",
        metavar="DEVICE",
    )

    @property
    def widths(self) -> tuple[int, ...]:
        """Tensor ranks of each pipeline stage."""
        if self.pipeline_tensor_sizes is not None:
            return tuple(int(width) for width in self.pipeline_tensor_sizes.split(","))
        return (self.tensor_parallel_size,) * self.pipeline_parallel_size

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.context_parallel_size * sum(self.widths)

    @property
    def replicas_share_machine(self) -> bool:
        """Several replicas, and all of them here."""
        return self.data_parallel_size > 1 and self.nnodes == 1 and self.distributed_executor_backend != "ray"

    def nodes_of(self, replica: int) -> range:
        """Those that have its ranks, without Ray; its engine is on node 0 in any case."""
        each = max(1, self.nnodes // self.data_parallel_size)
        return range(replica * each, (replica + 1) * each) if self.nnodes > 1 else range(1)

    @property
    def replica_here(self) -> int:
        """Which replica this node has ranks of; one beyond those that are configured asks the last."""
        return min(self.node_rank // len(self.nodes_of(0)), self.data_parallel_size - 1)

    def port_of(self, replica: int) -> int:
        """Of node 0, where that replica's nodes join."""
        return self.master_port + replica

    def forks_ranks(self, replica: int = 0) -> bool:
        """Whether processes of this node alone will compute, as far as is known before the model is."""
        several = self.world_size > 1 or self.nnodes > 1
        backend = self.distributed_executor_backend or ("mp" if several else "inprocess")
        return backend == "mp" and self.nodes_of(replica) == range(1)

    def meets_nodes(self, replica: int) -> bool:
        """Whether other nodes call here for that replica, as node 0."""
        elsewhere = self.nnodes > 1 and self.nodes_of(replica) != range(1)
        backend = self.distributed_executor_backend
        return elsewhere and self.node_rank == 0 and bool(self.master_addr) and backend != "ray"

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage; empty while that is automatic."""
        return () if self.pipeline_split == "auto" else tuple(int(n) for n in self.pipeline_split.split(","))

    @property
    def tensor_weights(self) -> tuple[tuple[float, ...], ...]:
        """Shares of each stage's tensor ranks; empty while that is automatic."""
        if self.tensor_split == "auto":
            return ()
        stages = [tuple(float(share) for share in part.split(",")) for part in self.tensor_split.split(";")]
        return tuple(stages * len(self.widths) if len(stages) == 1 else stages)


SHORTEST_HANG_S = 0.5
"""Of `hang_timeout`. Who looks for signs of life looks every 0.25 s: with less, what is well would be replaced."""


@dataclass(frozen=True)
class RecoveryConfig:
    enable_recovery: bool = option(
        True, "Replace workers and engines that die or hang, and go on with every request. Without it, a loss ends all."
    )
    hang_timeout: float = option(
        10.0,
        "Seconds without any progress after which a worker counts as hung; more while it loads, in its first steps, "
        "and where steps are slow.",
    )
    replacement_timeout: float = option(
        10.0,
        "Seconds to wait for a lost worker's place to come back, before the model is split over those that are left.",
    )
    recovery_timeout: float = option(
        600.0, "Seconds that accepted requests wait for workers; then they end with an error, and the server with them."
    )


@dataclass(frozen=True)
class LimitsConfig:
    """What one client request may ask for. Each limit is named in the error it causes."""

    max_n: int = option(128, "Largest `n`.")
    max_stop_strings: int = option(16, "Most `stop` strings.")
    max_stop_length: int = option(256, "Longest `stop` string or bad word, in characters.")
    max_bad_words: int = option(128, "Most `bad_words`.")
    max_logprobs: int = option(20, "Largest `logprobs`, `top_logprobs` and `prompt_logprobs`.")
    max_logit_bias: int = option(1024, "Most entries in `logit_bias`, `allowed_token_ids` and `stop_token_ids`.")
    max_prompts: int = option(128, "Most prompts in one completion request.")
    max_messages: int = option(2048, "Most messages in one chat request.")
    max_grammar_bytes: int = option(65536, "Largest JSON Schema, regex or grammar.", parse=parse_size)
    max_grammar_depth: int = option(32, "Deepest nesting of a JSON Schema.")
    max_body_bytes: int = option(8 * 2**20, "Largest request body.", parse=parse_size)
    max_concurrent_requests: int = option(2048, "HTTP requests handled at the same time; more are refused with 503.")


@dataclass(frozen=True)
class ServerConfig:
    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 opens the server to the network.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    api_server_count: int = option(
        1, "Processes that answer HTTP and turn text into tokens and back, all on one port.", "-asc"
    )
    router_listen: str | None = option(
        None,
        "Address of this machine where API servers of other machines may join (--router), for the engines here.",
        parse=parse_address,
        metavar="ADDRESS[:PORT]",
    )
    router: str | None = option(
        None,
        "Run no engine: answer HTTP for the engines of another machine, at its --router-listen address.",
        parse=parse_address,
        metavar="ADDRESS[:PORT]",
    )
    api_key: tuple[str, ...] = option((), "Key(s) that clients must send as `Authorization: Bearer …`.", secret=True)
    ssl_keyfile: str | None = option(None, "TLS private key (PEM).")
    ssl_certfile: str | None = option(None, "TLS certificate chain (PEM).")
    ssl_ca_certs: str | None = option(None, "Accept only clients with a certificate signed by these authorities (PEM).")
    allowed_origins: tuple[str, ...] = option((), "Browser origins allowed to call the API (CORS). Default: none.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host names accepted in requests. Default: any with an API key or a non-loopback --host; else loopback names.",
    )
    request_timeout: float = option(600.0, "Seconds after which a request ends with 504.")
    shutdown_timeout: float = option(30.0, "Seconds that running requests may take to finish after SIGTERM.")
    sse_keep_alive_interval: float = option(15.0, "Seconds between comments that keep an idle stream open.")
    log_level: str = option("info", "What to log.", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "`json` logs one object a line.", choices=("text", "json"))
    access_log: bool = option(False, "Log each HTTP request.")


@dataclass(frozen=True)
class EngineConfig:
    """The whole configuration. An object downstream receives the narrowest part it needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from flat option names (`max_model_len=…`). Names of vLLM that change nothing here are warned of.
        Raises ConfigError on an unknown name, with a suggestion, and on a value of the wrong type or outside its
        choices."""
        sections: dict[str, dict[str, Any]] = {f.name: {} for f in dataclasses.fields(cls)}
        known = options_by_name()
        for name, value in without_ignored(options).items():
            if name not in known:
                import difflib

                close = difflib.get_close_matches(name, known, 1)
                raise ConfigError(f"Unknown option '{name}'.", fix=f"Did you mean '{close[0]}'?" if close else None)
            section, declared = known[name]
            sections[section][name] = _checked(declared, value)
        return cls(**{name: _SECTIONS[name](**values) for name, values in sections.items()})


_SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "recovery": RecoveryConfig,
    "limits": LimitsConfig,
    "server": ServerConfig,
}

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,), "bool": (bool,)}


def options_by_name() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Every option: its name to (section, declaration). Names are unique over all sections."""
    return {f.name: (section, f) for section, cls in _SECTIONS.items() for f in dataclasses.fields(cls)}


def _checked(declared: dataclasses.Field[Any], value: Any) -> Any:
    """`value` as the declared type, parsed when it is text for a number. Raises ConfigError."""
    name, kind = declared.name, str(declared.type)
    if value is None:
        if "None" in kind:
            return None
        raise ConfigError(f"`{name}` needs a value.")
    if kind.startswith("tuple"):
        items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"`{name}` must be a list of strings.")
        parse = declared.metadata["parse"]
        return items if parse is None else tuple(parse(item) for item in items)
    base = kind.removesuffix(" | None")
    if isinstance(value, dict) and declared.metadata["metavar"] == "JSON":
        value = declared.metadata["parse"](value)
    elif isinstance(value, str) and (base != "str" or declared.metadata["parse"] is not None):
        value = parse_text(declared, value)
    if not isinstance(value, _TYPES[base]) or (isinstance(value, bool) and base != "bool"):
        raise ConfigError(f"`{name}` must be {base}, got {type(value).__name__}.")
    checked: Any = value
    if isinstance(checked, int) and not -(2**63) <= checked < 2**64:
        raise ConfigError(f"`{name}` is too {'large' if checked > 0 else 'small'}.", fix="It must fit into 64 bits.")
    choices = declared.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"`{name}` is '{value}'.", fix=f"Choose one of {', '.join(choices)}.")
    return float(checked) if base == "float" else checked


def parse_text(declared: dataclasses.Field[Any], text: str) -> Any:
    """The value that `text` means for this option, as given by a flag or variable. Raises ConfigError."""
    base = str(declared.type).removesuffix(" | None")
    if declared.metadata["parse"] is not None:
        return declared.metadata["parse"](text)
    if base == "bool":
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"`{declared.name}` is '{text}'.", fix="Write true or false.")
    if base in ("int", "float"):
        try:
            return int(text) if base == "int" else float(text)
        except ValueError:
            raise ConfigError(
                f"`{declared.name}` is '{text}', which is not {'an integer' if base == 'int' else 'a number'}."
            ) from None
    return text


class SpecFacts(Protocol):
    """What `resolve` needs to know of a model (`models.spec.DecoderSpec` has it)."""

    @property
    def max_positions(self) -> int: ...

    @property
    def checkpoint_dtype(self) -> str: ...


class HardwareFacts(Protocol):
    """What `resolve` needs to know of the machine (`planner.hardware.Hardware` has it)."""

    @property
    def device(self) -> str: ...

    @property
    def native_bfloat16(self) -> bool: ...


def resolve(config: EngineConfig, spec: SpecFacts, hardware: HardwareFacts) -> EngineConfig:
    """Replace every automatic value that the model and the machine decide, and check what they make impossible.

    Returns a new object; sizes that need measured memory (the KV cache) are decided by the worker. Raises ConfigError.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    parallel = _resolve_parallel(config.parallel)
    positive = {
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_queued_reqs": scheduler.max_num_queued_reqs,
        "max_model_len": model.max_model_len,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
    for name, least in (("hang_timeout", SHORTEST_HANG_S), ("replacement_timeout", 0.0), ("recovery_timeout", 0.0)):
        if not (seconds := getattr(config.recovery, name)) >= least:
            raise ConfigError(f"--{name.replace('_', '-')} is {seconds:g}; it must be at least {least:g}.")
    if scheduler.max_num_seqs > 65535:
        raise ConfigError(f"--max-num-seqs is {scheduler.max_num_seqs}; at most 65535 requests can run at once.")
    if cache.gpu_memory_utilization is not None and not 0 < cache.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization is {cache.gpu_memory_utilization:g}; it must be above 0 and at most 1."
        )
    if model.max_model_len is not None and model.max_model_len > spec.max_positions:
        raise ConfigError(
            f"--max-model-len is {model.max_model_len}, but the model was made for at most {spec.max_positions} "
            "tokens.",
            fix=f"Use at most {spec.max_positions}.",
        )
    device = hardware.device if model.device == "auto" else model.device
    if device == "cuda" and parallel.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size is {parallel.data_parallel_size}, but replicas run on CPUs in this version.",
            fix="Use --tensor-parallel-size to use several GPUs, or --device cpu.",
        )
    dtype = model.dtype
    if dtype == "auto":
        narrow = device == "cuda" or hardware.native_bfloat16
        dtype = "bfloat16" if narrow and spec.checkpoint_dtype != "float32" else "float32"
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model, device=device, dtype=dtype, max_model_len=model.max_model_len or spec.max_positions
        ),
        cache=dataclasses.replace(
            cache, kv_cache_dtype=dtype if cache.kv_cache_dtype == "auto" else cache.kv_cache_dtype
        ),
        parallel=parallel,
    )


def _resolve_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """The layout's sizes and the executor decided; the splits may still be automatic. Raises ConfigError for numbers
    that no model and no machine could serve."""
    for axis in ("tensor", "pipeline", "data", "context"):
        size = getattr(parallel, f"{axis}_parallel_size")
        if size < 1:
            raise ConfigError(f"--{axis}-parallel-size is {size}; it must be at least 1.")
        if size > 1 and axis == "context":
            raise ConfigError(
                f"--{axis}-parallel-size is {size}, but {axis} parallelism is not in this version.",
                fix=f"Use --{axis}-parallel-size 1.",
            )
    widths = parallel.widths
    for size, wanted, flag in (
        (parallel.pipeline_parallel_size, len(widths), "--pipeline-parallel-size"),
        (parallel.tensor_parallel_size, max(widths), "--tensor-parallel-size"),
    ):
        if size not in (1, wanted):
            raise ConfigError(
                f"{flag} is {size}, but --pipeline-tensor-sizes {parallel.pipeline_tensor_sizes} means {wanted}.",
                fix="Leave one of them out.",
            )
    layout_rules.check_splits(parallel)
    layout_rules.check_nodes(parallel)
    layout_rules.check_replicas(parallel)
    for name in ("num_cpus_per_worker", "num_gpus_per_worker"):
        amount = getattr(parallel, name)
        if amount is not None and not 0 <= amount < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {amount:g}; it must be 0 or more.")
    backend = parallel.distributed_executor_backend
    if backend == "inprocess" and parallel.nnodes > 1:
        raise ConfigError("--distributed-executor-backend inprocess runs one rank here, not on other nodes.")
    if backend == "inprocess" and parallel.world_size > 1:
        raise ConfigError(
            f"--distributed-executor-backend inprocess runs one rank, but the layout has {parallel.world_size}.",
            fix="Use mp, or leave it out.",
        )
    return dataclasses.replace(
        parallel,
        pipeline_parallel_size=len(widths),
        tensor_parallel_size=max(widths),
        pipeline_tensor_sizes=None if len(set(widths)) == 1 else parallel.pipeline_tensor_sizes,
        distributed_executor_backend=backend
        or ("inprocess" if parallel.world_size == 1 and parallel.nnodes == 1 else "mp"),
    )
