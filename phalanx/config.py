"""Everything a user can set, as frozen dataclasses; each option is declared once, with its help text.

Command-line flags, `PHALANX_…` variables, YAML keys and docs/configuration.md are made from these declarations
(`phalanx.cli.flags`). `resolve` replaces every automatic value once and returns a new object; what is only known at
run time is not configuration.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def option(
    default: Any,
    help: str,
    *flags: str,
    choices: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    positional: bool = False,
    secret: bool = False,
) -> Any:
    """One option. The flag is the field's name in kebab case; `flags` adds aliases such as `-tp`. `parse` turns text
    into the value and raises ConfigError; a tuple default makes the flag repeatable."""
    metadata = {
        "help": help,
        "flags": flags,
        "choices": choices,
        "parse": parse,
        "positional": positional,
        "secret": secret,
    }
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """`4096`, `1k` = 1000, `1K` = 1024, `2G` = 2 GiB, `1.5g`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(?:i?[bB])?", text.strip())
    if not match:
        raise ConfigError(
            f"'{text}' is not a size.", fix="Write a number with an optional k, m, g, K, M or G: 4096, 32k, 2G."
        )
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


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
    dtype: str = option("auto", "Type of weights and activations.", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str | None = option(
        None, "Quantisation scheme of the weights. Default: as the checkpoint says.", "-q"
    )
    load_format: str = option(
        "auto", "`dummy` fills the weights with random numbers, without reading them.", choices=("auto", "dummy")
    )
    max_model_len: int | None = option(
        None, "Longest context (prompt and answer) in tokens. Default: the model's own.", parse=parse_size
    )
    chat_template: str | None = option(None, "Jinja chat template: a file, or the template itself in one line.")
    generation_config: str = option(
        "auto",
        "`auto` takes sampling defaults from the model's generation_config.json, `none` does not.",
        choices=("auto", "none"),
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
        "auto", "Type of the KV cache; auto is the model's.", choices=("auto", "float32", "bfloat16", "float16")
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV cache of equal prompt beginnings.")


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = option(128, "Requests that run at the same time.")
    max_num_batched_tokens: int = option(
        2048, "Tokens computed in one step; longer prompts are computed in chunks.", parse=parse_size
    )
    max_num_queued_reqs: int = option(1024, "Requests that may wait; more are refused with 503.")


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = option(1, "Ranks that share every layer.", "-tp")
    pipeline_parallel_size: int = option(1, "Stages of consecutive layers.", "-pp")
    data_parallel_size: int = option(1, "Replicas of the whole model.", "-dp")
    context_parallel_size: int = option(1, "Ranks that share every context.", "-cp")
    distributed_executor_backend: str | None = option(
        None, "How ranks are started. Default: chosen by the layout.", choices=("inprocess", "mp", "ray")
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
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from flat option names (`max_model_len=…`). Raises ConfigError on an unknown name, with a suggestion,
        and on a value of the wrong type or outside its choices."""
        sections: dict[str, dict[str, Any]] = {f.name: {} for f in dataclasses.fields(cls)}
        known = options_by_name()
        for name, value in options.items():
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
        items = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"`{name}` must be a list of strings.")
        return items
    base = kind.removesuffix(" | None")
    if isinstance(value, str) and base != "str":
        value = parse_text(declared, value)
    if not isinstance(value, _TYPES[base]) or (isinstance(value, bool) and base != "bool"):
        raise ConfigError(f"`{name}` must be {base}, got {type(value).__name__}.")
    checked: Any = value
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
    model, cache, scheduler, parallel = config.model, config.cache, config.scheduler, config.parallel
    for axis in ("tensor", "pipeline", "data", "context"):
        size = getattr(parallel, f"{axis}_parallel_size")
        if size != 1:
            raise ConfigError(
                f"--{axis}-parallel-size is {size}, but {axis} parallelism is not in this version.",
                fix=f"Use --{axis}-parallel-size 1.",
            )
    if parallel.distributed_executor_backend not in (None, "inprocess"):
        raise ConfigError(
            f"--distributed-executor-backend {parallel.distributed_executor_backend} is not in this version.",
            fix="Use inprocess.",
        )
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
        parallel=dataclasses.replace(parallel, distributed_executor_backend="inprocess"),
    )
