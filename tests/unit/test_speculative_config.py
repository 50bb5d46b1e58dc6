"""`--speculative-config`: what it takes, what it is made of, and what it says to mistakes."""

from __future__ import annotations

import json

import pytest

from phalanx.config import EngineConfig
from phalanx.errors import ConfigError
from phalanx.speculative_config import SpeculativeConfig, parse_speculative_config, read_speculative_config

GIVEN = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def test_text_and_mapping_mean_the_same():
    for given in (GIVEN, json.dumps(GIVEN), json.dumps(GIVEN, indent=2)):
        config = EngineConfig.from_options(speculative_config=given).scheduler
        assert config.speculation == SpeculativeConfig("ngram", 4, 4, 2)
        assert config.max_num_sampled == config.max_num_seqs + 4
    assert EngineConfig.from_options().scheduler.speculation is None


@pytest.mark.parametrize(
    ("bounds", "longest", "shortest"),
    [({}, 5, 5), ({"prompt_lookup_max": 3}, 3, 3), ({"prompt_lookup_min": 2}, 2, 2)],
)
def test_bounds_that_are_not_given(bounds, longest, shortest):
    config = read_speculative_config({"method": "ngram", "num_speculative_tokens": 1, **bounds})
    assert (config.prompt_lookup_max, config.prompt_lookup_min) == (longest, shortest)
    assert read_speculative_config(parse_speculative_config(json.dumps(config.__dict__))) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ngram", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "needs a method"),
        ('{"method": "eagle", "model": "x"}', "'eagle', which is not here"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "'eagle', which is not here"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({**GIVEN, "model": "x"}, "no field 'model'"),
        ({**GIVEN, "num_speculative_token": 3}, "no field 'num_speculative_token'"),
        ({**GIVEN, "num_speculative_tokens": 0}, "from 1 to 64"),
        ({**GIVEN, "num_speculative_tokens": True}, "from 1 to 64"),
        ({**GIVEN, "num_speculative_tokens": "4"}, "from 1 to 64"),
        ({**GIVEN, "prompt_lookup_max": 10**6}, "from 1 to 64"),
        ({**GIVEN, "prompt_lookup_min": 5}, "more than prompt_lookup_max"),
    ],
)
def test_mistakes_are_named(given, words):
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.from_options(speculative_config=given)
    assert "speculative-config" in str(caught.value)


def test_a_misspelt_field_is_corrected():
    with pytest.raises(ConfigError) as caught:
        read_speculative_config({**GIVEN, "prompt_lookup_maximum": 3})
    assert caught.value.fix == "Did you mean 'prompt_lookup_max'?"
