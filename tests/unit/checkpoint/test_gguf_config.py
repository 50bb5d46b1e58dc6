"""GGUF metadata become the config.json of the same family, as transformers would read it."""

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from phalanx.checkpoint.gguf_config import generation_config, hf_config
from phalanx.checkpoint.gguf_header import read_gguf
from phalanx.checkpoint.locate import locate
from phalanx.errors import FormatError, UnsupportedModel
from tests.helpers.gguf_files import decoder_metadata, decoder_tensors, raw_tensor, write_gguf


@pytest.fixture
def config_of(tmp_path):
    def build(arch, tensors=None, top=None, **changes):
        metadata = decoder_metadata(arch, **changes) | (top or {})
        return hf_config(read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors or decoder_tensors())))

    return build


CLASSES = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "phi3": transformers.Phi3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
}


@pytest.mark.parametrize("arch", CLASSES)
def test_transformers_understands_the_config_of_each_gated_decoder(config_of, arch):
    config = config_of(arch, **{"attention.key_length": 32, "attention.value_length": 32})
    built = CLASSES[arch](**{key: item for key, item in config.items() if key != "torch_dtype"})
    assert built.model_type == config["model_type"]
    assert (built.hidden_size, built.intermediate_size, built.num_hidden_layers) == (64, 96, 2)
    assert (built.num_attention_heads, built.num_key_value_heads, config["head_dim"]) == (4, 2, 32)
    assert (built.vocab_size, built.max_position_embeddings, built.rms_norm_eps) == (8, 128, 1e-5)
    assert (built.bos_token_id, built.eos_token_id) == (1, 2)
    assert built.tie_word_embeddings is True
    unknown = set(config) - set(CLASSES[arch]().to_dict()) - {"architectures", "torch_dtype", "head_dim"}
    assert unknown <= {"attention_bias", "hidden_act"}
    assert built.to_dict()["rope_parameters"] == config["rope_parameters"] or arch == "phi3"


def test_demo_model():
    config = locate(None).config
    assert config["model_type"] == "llama"
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (576, 1536, 30)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["vocab_size"], config["tie_word_embeddings"], config["rms_norm_eps"]) == (49152, True, 1e-5)


def test_tied_or_own_head(config_of):
    head = decoder_tensors(output__weight=np.zeros((8, 64)))
    assert config_of("llama", head)["tie_word_embeddings"] is False
    assert config_of("llama")["tie_word_embeddings"] is True


def test_biases_are_seen_in_the_tensors(config_of):
    assert config_of("llama")["attention_bias"] is False
    biased = decoder_tensors(blk__0__attn_q__bias=np.zeros(64), blk__0__ffn_gate__bias=np.zeros(96))
    config = config_of("llama", biased)
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)


def test_mistral_is_llama_with_a_window(config_of):
    config = config_of("llama", **{"attention.sliding_window": 64})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_heads_default_to_no_grouping_and_may_come_as_one_value_per_layer(config_of):
    assert config_of("llama", **{"attention.head_count_kv": None})["num_key_value_heads"] == 4
    assert config_of("llama", **{"attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModel, match="layers differ in"):
        config_of("llama", **{"attention.head_count_kv": [2, 4]})


def inverse_frequencies(config, kind):
    config = transformers.LlamaConfig(**{k: v for k, v in config.items() if k != "torch_dtype"})
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def test_llama3_scaling_arrives_through_its_divisors(config_of):
    """The converter stores Llama 3's scaling as a tensor of divisors; what we make of it gives the same frequencies."""
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    base = config_of("llama", **{"rope.freq_base": 500000.0})
    expected, attention = inverse_frequencies(base | {"rope_parameters": llama3}, "llama3")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    config = config_of(
        "llama", decoder_tensors(rope_freqs__weight=(plain / expected).numpy()), **{"rope.freq_base": 500000.0}
    )
    got, got_attention = inverse_frequencies(config, config["rope_parameters"]["rope_type"])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert got_attention == attention == 1.0
    ones = config_of("llama", decoder_tensors(rope_freqs__weight=np.ones(8)))
    assert ones["rope_parameters"]["rope_type"] == "default"


def test_linear_and_yarn_scaling(config_of):
    linear = config_of("llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert linear["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    yarn = config_of("qwen2", **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                 "rope.scaling.original_context_length": 32})  # fmt: skip
    assert yarn["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                       "original_max_position_embeddings": 32}  # fmt: skip
    none = config_of("llama", **{"rope.scaling.type": "none"})
    assert none["rope_parameters"]["rope_type"] == "default"
    with pytest.raises(UnsupportedModel, match="RoPE by 'odd'"):
        config_of("llama", **{"rope.scaling.type": "odd"})


@pytest.mark.parametrize(("rotary", "head_dim"), [(12, 16), (26, 80), (72, 96), (58, 116)])
def test_partial_rotary_survives_the_division(config_of, rotary, head_dim):
    config = config_of("llama", **{"rope.dimension_count": rotary, "attention.key_length": head_dim,
                                   "attention.value_length": head_dim})  # fmt: skip
    assert int(head_dim * config["rope_parameters"]["partial_rotary_factor"]) == rotary


def test_qwen1_counts_both_halves_of_the_gate(config_of):
    config = config_of("qwen", **{"attention.head_count_kv": None})
    assert (config["model_type"], config["intermediate_size"], config["kv_channels"]) == ("qwen", 192, 16)
    assert (config["seq_length"], config["rotary_emb_base"], config["layer_norm_epsilon"]) == (128, 10000.0, 1e-5)
    assert config["rotary_pct"] == 1.0


def test_gpt2(config_of):
    config = config_of("gpt2", **{"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": None})
    built = transformers.GPT2Config(**{key: item for key, item in config.items() if key != "torch_dtype"})
    assert (built.n_embd, built.n_head, built.n_layer, built.n_inner, built.n_positions) == (64, 4, 2, 96, 128)
    assert (built.vocab_size, built.layer_norm_epsilon, built.activation_function) == (8, 1e-5, "gelu_new")
    assert set(config) - {"architectures", "torch_dtype", "model_type"} <= set(transformers.GPT2Config().to_dict())


def test_phi3_long_rope(config_of):
    factors = decoder_tensors(rope_factors_short__weight=np.full(6, 1.5), rope_factors_long__weight=np.full(6, 4.0))
    scaling = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25}
    config = config_of("phi3", factors, **{"rope.dimension_count": 12, "attention.sliding_window": 0}, **scaling)
    assert config["rope_parameters"] == {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.5] * 6,
        "long_factor": [4.0] * 6, "original_max_position_embeddings": 32, "attention_factor": 1.25,
    }  # fmt: skip
    assert (config["original_max_position_embeddings"], config["sliding_window"]) == (32, None)


def test_gemma(config_of):
    two = config_of("gemma2", **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
                                 "attention.sliding_window": 16, "attention.key_length": 32,
                                 "attention.value_length": 32})  # fmt: skip
    assert (two["attn_logit_softcapping"], two["final_logit_softcapping"], two["sliding_window"]) == (50.0, 30.0, 16)
    assert two["layer_types"] == ["sliding_attention", "full_attention"]
    assert (two["query_pre_attn_scalar"], two["hidden_activation"]) == (32, "gelu_pytorch_tanh")
    bare = config_of("gemma2")
    assert (bare["attn_logit_softcapping"], bare["final_logit_softcapping"], bare["sliding_window"]) == (50, 30, 4096)
    assert config_of("gemma3")["layer_types"] == ["full_attention", "full_attention"]  # no window given
    three = config_of(
        "gemma3",
        **{
            "attention.sliding_window": 16,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base": None,
        },
    )
    assert three["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert three["layer_types"] == ["sliding_attention", "sliding_attention"]
    told = config_of("gemma3", **{"attention.sliding_window": 16, "attention.sliding_window_pattern": [False, True]})
    assert told["layer_types"] == ["full_attention", "sliding_attention"]


def test_generation_config_has_every_end_and_the_sampling_defaults(tmp_path):
    more = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.padding_token_id": 4294967295,
            "general.sampling.temp": 0.5, "general.sampling.top_k": 20}  # fmt: skip
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", decoder_metadata("llama") | more, decoder_tensors()))
    assert generation_config(gguf) == {"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.5, "top_k": 20}
    assert "pad_token_id" not in hf_config(gguf)


CONTRADICTIONS = {
    "no layers": ({"block_count": None}, "block_count` is missing"),
    "more layers than tensors": ({"block_count": 3}, "claims 3 layers, but has tensors for 2"),
    "absurd layers": ({"block_count": 2**31 - 1}, "claims 2147483647 layers"),
    "layers as text": ({"block_count": "2"}, "not a sensible number"),
    "layers as bool": ({"block_count": True}, "not a sensible number"),
    "negative": ({"block_count": -2}, "not a sensible number"),
    "no heads": ({"attention.head_count": 0}, "head_count` is 0"),
    "heads that do not divide": ({"attention.head_count": 5}, "do not divide"),
    "width of another model": ({"embedding_length": 128}, "not one row of 128"),
    "infinite base": ({"rope.freq_base": float("inf")}, "not a finite number"),
    "odd rotary": ({"rope.dimension_count": 7}, "covers 7 of 16"),
    "rotary above the head": ({"rope.dimension_count": 32}, "covers 32 of 16"),
    "empty list": ({"attention.head_count": []}, "not a sensible number"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_format_errors(config_of, case):
    changes, words = CONTRADICTIONS[case]
    with pytest.raises(FormatError, match=words):
        config_of("llama", **changes)


def test_vocabulary_must_fit_the_embedding(config_of):
    with pytest.raises(FormatError, match="9 tokens, but its embedding has 8 rows"):
        config_of("llama", top={"tokenizer.ggml.tokens": [f"t{i}" for i in range(9)]})


@pytest.mark.parametrize("bad", [np.ones(7), np.full(8, np.nan), np.zeros(8), raw_tensor(np.ones(8), "F16")])
def test_bad_rope_factors(config_of, bad):
    with pytest.raises(FormatError, match="rope_freqs"):
        config_of("llama", decoder_tensors(rope_freqs__weight=bad))


def test_what_is_not_supported(config_of):
    with pytest.raises(
        UnsupportedModel, match=r"'mamba', which is not supported.*Supported GGUF architectures: gemma2"
    ):
        config_of("mamba")
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        config_of("llama", **{"expert_count": 8})
    with pytest.raises(FormatError, match="does not say which architecture"):
        config_of("llama", top={"general.architecture": 7})
