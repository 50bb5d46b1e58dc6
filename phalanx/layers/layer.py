"""What every part of a model is: an object with a `forward`, and parts of its own.

Not a torch module: nothing here is trained, hooked or moved, and a module looks its parts up through three dictionaries
in Python, half a microsecond each, hundreds of times a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Layer:
    forward: Any
    """The computation; its parameters differ from layer to layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def parts(self) -> Iterator[Layer]:
        """This layer and all within it, outside in, in the order in which they were made. One that is held in two
        places comes twice."""
        yield self
        for value in vars(self).values():
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Layer):
                    yield from part.parts()
