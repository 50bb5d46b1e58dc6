"""What a rank leaves, by the socket between it and whoever has started it."""

from __future__ import annotations

import os
import resource

import pytest

from phalanx.executor.kept_image import KeptImage, Line, socket_pair


@pytest.mark.parametrize("scarce", [False, True])
def test_its_last_words_are_its_own(scarce: bool) -> None:
    """Also where there is no descriptor left for its image."""
    kept, (ours, theirs), limits = KeptImage(), socket_pair(), resource.getrlimit(resource.RLIMIT_NOFILE)
    image = os.memfd_create("image")
    with theirs:
        line = Line("a share", None, theirs)
        line.keep(image)
        line.say("there is no such model")
    try:
        if scarce:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        said = kept.take(ours, "a share")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert said == "there is no such model"
    assert (kept.fd is None) == scarce
    assert kept.fd is None or os.path.samestat(os.fstat(kept.fd), os.fstat(image))
    kept.let_go()
    os.close(image)
