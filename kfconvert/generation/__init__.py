"""``generate`` of a converted model: the recorded step of one token with a static cache, and a lean loop."""

from .decoding import install_generate, runs_usual_loop, selects_other_mode
