"""Options that people know from vLLM and that Phalanx does not have (yet), each with the sentence it is answered with.

`IGNORED` options ask for nothing that Phalanx would do differently: they are accepted with one line of warning.
`REFUSED` options ask for something that is not there: going on without it would not be what the user wanted. Both are
listed as flags; `without_ignored` answers them as keyword arguments and as keys of a file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.errors import ConfigError

log = logging.getLogger(__name__)

_LOGGING = "Phalanx logs no requests; --access-log and --log-level choose what is logged."
_COMPILED = "nothing is compiled or captured as a graph."

IGNORED: dict[str, tuple[bool, str]] = {
    # flag: (takes a value, reason)
    "--enforce-eager": (False, _COMPILED),
    "--no-enforce-eager": (False, _COMPILED),
    "--compilation-config": (True, _COMPILED),
    "--optimization-level": (True, _COMPILED),
    "-O": (True, _COMPILED),
    "--max-seq-len-to-capture": (True, _COMPILED),
    "--cuda-graph-sizes": (True, _COMPILED),
    "--performance-mode": (True, "there is one mode."),
    "--trust-remote-code": (False, "Phalanx never runs code from a model's repository."),
    "--swap-space": (True, "preempted requests are computed again, not swapped out."),
    "--enable-chunked-prefill": (False, "long prompts are always computed in chunks."),
    "--async-scheduling": (False, "there is one way of scheduling."),
    "--disable-log-requests": (False, _LOGGING),
    "--no-enable-log-requests": (False, _LOGGING),
    "--disable-log-stats": (False, "statistics are at /metrics and are not logged."),
    "--disable-uvicorn-access-log": (False, "the access log is off unless --access-log is given."),
    "--disable-access-log-for-endpoints": (True, "the access log is off unless --access-log is given."),
    "--uvicorn-log-level": (True, "--log-level sets it."),
    "--max-log-len": (True, "prompts are never logged."),
    "--enable-request-id-headers": (False, "every answer carries X-Request-Id."),
    "--disable-custom-all-reduce": (False, "there is none."),
    "--disable-frontend-multiprocessing": (False, "the engine always has its own process."),
    "--tokenizer-mode": (True, "there is one kind of tokenizer."),
    "--prefix-caching-hash-algo": (True, "blocks are always hashed with a cryptographic hash."),
    "--structured-outputs-config": (True, "llguidance is the only grammar library."),
    "--guided-decoding-backend": (True, "llguidance is the only grammar library."),
    "--limit-mm-per-prompt": (True, "prompts are text only."),
    "--allowed-media-domains": (True, "prompts are text only, and nothing is fetched."),
    "--allowed-local-media-path": (True, "prompts are text only."),
    "--runner": (True, "Phalanx generates text."),
    "--task": (True, "Phalanx generates text."),
    "--use-tqdm-on-load": (False, "progress is shown on a terminal."),
}

_ADAPTERS = "there are no LoRA adapters; merge the adapter into the weights first."
_EXPERTS = "there is no expert parallelism yet, and no mixture-of-experts model is supported."
_TOOLS = "tool calls are not parsed out of answers."

REFUSED: dict[str, str] = {
    "--enable-lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--max-loras": _ADAPTERS,
    "--max-lora-rank": _ADAPTERS,
    "--speculative-model": "tokens are proposed without a model; see --speculative-config.",
    "--num-speculative-tokens": "it is a field of --speculative-config.",
    "--enable-expert-parallel": _EXPERTS,
    "--expert-parallel-size": _EXPERTS,
    "-ep": _EXPERTS,
    "--decode-context-parallel-size": "the context is not split.",
    "-dcp": "the context is not split.",
    "--kv-transfer-config": "the KV cache stays in the engine.",
    "--kv-offloading-size": "the KV cache stays in the engine; --kv-cache-memory-bytes sets its size.",
    "--cpu-offload-gb": "weights stay on one device.",
    "--num-gpu-blocks-override": "set the size of the KV cache with --kv-cache-memory-bytes.",
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
    "--reasoning-parser": "reasoning is not separated from the answer.",
    "--otlp-traces-endpoint": "there is no tracing; /metrics has the figures.",
    "--enable-sleep-mode": "the engine cannot sleep.",
    "--max-num-queued-tokens": "--max-num-queued-reqs bounds the queue.",
    "--uds": "the server listens on --host and --port only.",
    "--root-path": "the server cannot be mounted below a path.",
    "--middleware": "the server takes no middleware.",
    "--response-role": "answers have the role assistant.",
    "--ssl-cert-reqs": "--ssl-ca-certs alone makes client certificates required.",
    "--allow-credentials": "browsers send keys in a header, not as cookies.",
    "--allowed-methods": "--allowed-origins is what can be set.",
    "--allowed-headers": "--allowed-origins is what can be set.",
    "--default-chat-template-kwargs": "send `chat_template_kwargs` with the request.",
    "--hf-token": "log in with `hf auth login` or set HF_TOKEN.",
    "--download-dir": "HF_HOME names the folder of the hub's files, PHALANX_CACHE that of the demo model.",
    "--hf-overrides": "edit the model's config.json.",
    "--override-generation-config": "edit the model's generation_config.json or send the values with the request.",
    "--logits-processors": "only the sampling parameters of the API change logits.",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks.",
}


def without_ignored(options: Mapping[str, Any], warn: Callable[[str], None] = log.warning) -> dict[str, Any]:
    """The options that are not ignored, as they are; `warn` is told of each that is. Raises ConfigError for one that is
    refused."""
    kept = {}
    for name, value in options.items():
        reason = _ignored(name, value)
        if reason is None:
            kept[name] = value
        else:
            warn(f"{name} is ignored: {reason}")
    return kept


def _ignored(name: str, value: Any) -> str | None:
    """Why the option changes nothing; None where it is none of vLLM's. Raises ConfigError."""
    flag = "--" + str(name).replace("_", "-")
    negative = "--no-" + flag[2:]
    if value is False and negative in IGNORED.keys() | REFUSED.keys():
        flag = negative
    if flag in IGNORED:
        return IGNORED[flag][1]
    if flag not in REFUSED:
        return None
    if flag != negative and not value:  # what is not there is not asked for
        return REFUSED[flag]
    raise ConfigError(f"{name} is not in this version: {REFUSED[flag]}")
