"""Fetch the demo model into the cache folder, with progress, unless it is there."""

from __future__ import annotations

import sys

from phalanx.checkpoint.locate import locate
from phalanx.cli.messages import complain
from phalanx.errors import PhalanxError

if __name__ == "__main__":
    try:
        locate(None)
    except PhalanxError as error:
        complain(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
