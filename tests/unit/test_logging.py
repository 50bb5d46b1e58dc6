import io
import json
import logging

import pytest

from phalanx.logging import configure, escape

POISON = "id\r\n2026-01-01 INFO forged \x1b[31mred\x07 \x85\u2028end"


@pytest.fixture
def stream():
    return io.StringIO()


def test_text_lines_cannot_be_forged(stream):
    configure("info", "text", tag="worker 1", stream=stream)
    logging.getLogger("phalanx.x").info("request %s", POISON)
    (line,) = stream.getvalue().splitlines()
    assert "INFO [worker 1] request id\\r\\n2026" in line
    assert "\x1b" not in line
    assert line.isprintable()


def test_json_is_one_object_a_line(stream):
    configure("info", "json", tag="engine", stream=stream)
    logging.getLogger("phalanx.x").warning("request %s", POISON)
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "request " + POISON
    assert (entry["level"], entry["logger"], entry["tag"]) == ("warning", "phalanx.x", "engine")
    assert entry["time"] > 1.7e9


@pytest.mark.parametrize("format", ["text", "json"])
def test_tracebacks_are_kept_and_marked(stream, format):
    configure("debug", format, stream=stream)
    try:
        raise ValueError("first\nINFO second")
    except ValueError:
        logging.getLogger("phalanx").exception("failed")
    lines = stream.getvalue().splitlines()
    if format == "json":
        assert "ValueError" in json.loads(lines[0])["exception"]
        assert len(lines) == 1
    else:
        assert all(line.startswith("  | ") for line in lines[1:])
        assert any("ValueError" in line for line in lines)


def test_levels_and_reconfiguration(stream):
    configure("warning", stream=stream)
    logger = logging.getLogger("phalanx.x")
    logger.info("quiet")
    configure("info", stream=stream)
    logger.info("heard")
    assert len(stream.getvalue().splitlines()) == 1


def test_escape():
    assert escape("a\tb\n\x00é世🙂") == "a\\tb\\n\\x00é世🙂"
