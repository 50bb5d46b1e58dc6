"""The exception tree: what its drawing says is what the classes are, and every error has an OpenAI body."""

import re

import pytest

from phalanx import errors
from phalanx.errors import ContextLengthExceeded, InvalidRequest, PhalanxError, QueueFull, UserError


def classes(base=PhalanxError):
    yield base
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from classes(child)


def test_the_drawing_is_true():
    drawn = dict(re.findall(r"^[ │├└─]+([A-Z]\w+)(?: +(\d{3}))?", errors.__doc__ or "", re.MULTILINE))
    assert set(drawn) == {cls.__name__ for cls in classes()}
    for name, status in drawn.items():
        if status:
            assert getattr(errors, name).status == int(status), name


@pytest.mark.parametrize("cls", list(classes()))
def test_every_error_has_a_message_a_fix_and_a_body(cls):
    error = cls("It is wrong.", fix="Mend it.", param="p")
    assert str(error) == "It is wrong. Mend it."
    body = error.body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"] == "It is wrong. Mend it."
    assert body["param"] == "p"
    assert isinstance(body["type"], str)
    assert isinstance(body["code"], str)
    assert 400 <= cls.status <= 599


def test_who_is_to_blame_is_in_the_status():
    for cls in classes():
        assert issubclass(cls, UserError) == (cls.status < 500), cls


def test_codes_that_clients_look_for():
    assert ContextLengthExceeded("x").code == "context_length_exceeded"
    assert issubclass(ContextLengthExceeded, InvalidRequest)
    assert QueueFull("x", retry_after=7).retry_after == 7
    assert InvalidRequest("x", code="other").code == "other"
    assert InvalidRequest.code == "invalid_value"
