"""What nodes must have in common."""

from __future__ import annotations

import pytest

from phalanx.config import EngineConfig
from phalanx.executor.survey import difference, survey
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
