"""``generate`` of a converted model: the step of one token recorded over a static cache, and a lean loop around it."""

from .decoding import Generate, install_generate

__all__ = ["Generate", "install_generate"]
