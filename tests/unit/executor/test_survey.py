"""What nodes must have in common."""

from __future__ import annotations

import pytest

from phalanx.checkpoint.locate import locate_text
from phalanx.config import EngineConfig
from phalanx.executor.survey import difference, survey, text_difference, text_survey
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worker_model import write_model


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ({"tensor_split": "3,1"}, {"tensor_split": "1,3"}, "--tensor-split is 3,1 on a and 1,3 on b"),
        ({"pipeline_split": "2,1"}, {"pipeline_split": "1,2"}, "--pipeline-split is 2,1 on a and 1,2 on b"),
        ({"tensor_split": "3,1"}, {}, ""),
        ({}, {"tensor_split": "3,1"}, ""),
        ({}, {"load_format": "dummy"}, "--load-format is auto on a and dummy on b"),
    ],
    ids=lambda value: None,
)
def test_a_split_may_be_left_to_node_0_and_not_contradict_it(here, there, words, tmp_path) -> None:
    model = str(write_model(tmp_path / "model"))
    sizes = {"model": model, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    if "tensor_split" in {**here, **there}:
        sizes["pipeline_parallel_size"] = 1
    ours, theirs = (survey(EngineConfig.from_options(**{**sizes, **options})) for options in (here, there))
    found = difference(ours, theirs, "a", "b")
    assert (words in found.message) if words else found is None


def test_who_works_on_text_only_needs_the_same_text_wherever_it_is(tmp_path) -> None:
    def seen(folder, **options):
        config = EngineConfig.from_options(model=str(folder), **options)
        return text_survey(config, locate_text(str(folder)))

    whole, there = write_tiny_model(tmp_path / "whole"), write_tiny_model(tmp_path / "there")
    ours = seen(whole)
    assert [file.name for file in ours.files][-1] == "model.safetensors"
    assert text_difference(ours, seen(there), "a", "b") is None, "the folder's name plays no part"
    (there / "model.safetensors").unlink()
    assert text_difference(ours, seen(there), "a", "b") is None, "nor do weights that are not there"
    elsewhere = tmp_path / "tokenizer"
    elsewhere.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (there / name).rename(elsewhere / name)
    found = text_difference(ours, seen(there), "a", "b")
    assert found is not None and "b lacks tokenizer.json" in found.message
    assert text_difference(ours, seen(there, tokenizer=str(elsewhere)), "a", "b") is None
    (there / "config.json").write_text((there / "config.json").read_text() + " ")
    found = text_difference(ours, seen(there, tokenizer=str(elsewhere)), "a", "b")
    assert found is not None and "config.json has" in found.message
