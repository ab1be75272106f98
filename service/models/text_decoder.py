"""A text decoder whose text goes through a family's post-processing while it comes.

Thread: the engine's; one decoder per answer. Knows no vocabulary and no rules: both are passed in.
"""

from __future__ import annotations

from service.models.postprocess import Transform
from service.text import TextDecoder


class Transformed:
    """A decoder whose text goes through a transform."""

    def __init__(self, decoder: TextDecoder, transform: Transform) -> None:
        self._decoder = decoder
        self._transform = transform

    def push(self, id: int, /) -> str:
        return self._transform.push(self._decoder.push(id))

    def finish(self) -> str:
        return self._transform.push(self._decoder.finish()) + self._transform.finish()
