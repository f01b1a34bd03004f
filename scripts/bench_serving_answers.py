"""The requests of bench_serving.py for each service, and the check of the answers against the original model."""

from __future__ import annotations

import base64
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

KINDS = 32  # of requests; each is sent many times
# Largest distance of an answer, relative to the largest value: batches of another size take other kernels, which round
# differently in TF32 and half precision.
OF_SCORES, OF_IMAGES, OF_TOKENS = 0.005, 0.05, 0.05
ROOM = 64  # tokens of the longest prompt, and of the longest answer


class Nearest:
    """Answers that are tensors. A right answer is near the output of the model for the request alone.

    Args:
        bodies: the request of each kind.
        expected: [kinds, values], the output for each kind.
        tolerance: the allowed distance, relative to the largest value.
        read: returns the values of an answer.
    """

    unit = "requests"

    def __init__(self, bodies: list[bytes], expected: Tensor, tolerance: float, read: Callable[[Any], Tensor]):
        self.bodies, self._expected, self._read = bodies, expected, read
        self._allowed = tolerance * expected.abs().max()
        apart = (expected[:, None] - expected).abs().amax(2).fill_diagonal_(float("inf")).min()
        if apart < 5 * self._allowed:
            raise SystemExit("the answers for two requests are so near that none could be told to be mixed up")

    def value(self, lines: list[Any]) -> Tensor:
        (line,) = lines
        return self._read(line)

    def units(self, value: Tensor) -> int:
        return 1

    def outcome(self, kind: int, value: Tensor) -> str:
        if len(value) != self._expected.shape[1]:
            return "wrong"
        distances = (self._expected - value).abs().amax(1)
        if distances[kind] <= self._allowed:
            return "right"
        return "mixed up" if distances.min() <= self._allowed else "wrong"


class Tokens:
    """Answers that are tokens. For a right answer, the model alone gives each token the best score, or nearly so.

    Half precision rounds many scores to equal values, so greedy decoding in batches of other sizes may choose others.

    Args:
        model: the original model.
        prompts: the prompt of each kind, with ``tokens`` and ``max_new_tokens``.
        end: the token that ends an answer.
    """

    unit = "tokens"

    def __init__(self, model: nn.Module, prompts: list[Any], end: int):
        self.bodies = [prompt.model_dump_json().encode() for prompt in prompts]
        self._model, self._prompts, self._end = model, prompts, end
        self.outcome = functools.cache(self._outcome)

    def value(self, lines: list[Any]) -> tuple[int, ...]:
        *steps, last = lines
        if last["tokens"] != len(steps):
            raise ValueError("a token of the stream is missing")
        return tuple(step["token"] for step in steps)

    def units(self, value: tuple[int, ...]) -> int:
        return len(value)

    def _outcome(self, kind: int, value: tuple[int, ...]) -> str:
        if self._fits(self._prompts[kind], value):
            return "right"
        return "mixed up" if any(self._fits(prompt, value) for prompt in self._prompts) else "wrong"

    @torch.no_grad()
    def _fits(self, prompt: Any, value: tuple[int, ...]) -> bool:
        ends = [place for place, token in enumerate(value, 1) if token == self._end]
        if len(value) != min(ends[:1] + [prompt.max_new_tokens]):
            return False
        model: Any = self._model
        ids = torch.tensor([[*prompt.tokens, *value]], device=model.device)
        scores = model(ids).logits[0, len(prompt.tokens) - 1 : -1].float()
        chosen = scores.gather(1, ids[:, len(prompt.tokens) :].T)
        return bool((scores.amax(1, True) - chosen <= OF_TOKENS * scores.abs().max()).all())


@torch.no_grad()
def of_images(small: bool, device: str) -> Nearest:
    """The requests of serve_litserve.py and of serve_ray.py."""
    from serving import as_input, classifier, images

    model, size = classifier(small)
    pixels = images(KINDS, size)
    expected = torch.cat([model.to(device)(as_input(image[None]).to(device)).cpu() for image in pixels])
    bodies = [json.dumps({"image": base64.b64encode(bytes(image.flatten())).decode()}).encode() for image in pixels]
    return Nearest(bodies, expected, OF_SCORES, lambda line: torch.tensor(line["scores"]))


def of_prompts(small: bool, device: str) -> Tokens:
    """The requests of serve_language_model.py: prompts and answers of several lengths."""
    from serve_language_model import END, VOCABULARY, Prompt, language_model

    generator = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(
            tokens=torch.randint(END + 1, VOCABULARY, (ROOM - kind,), generator=generator).tolist(),
            max_new_tokens=ROOM - 8 * (kind % 4),
        )
        for kind in range(KINDS)
    ]
    return Tokens(language_model(small, device), prompts, END)


@torch.no_grad()
def of_labels(small: bool, device: str) -> Nearest:
    """The requests of serve_diffusion.py."""
    from serve_diffusion import LABELS, Painter, Request
    from torchvision.io import decode_image

    def read(line: Any) -> Tensor:
        file = torch.frombuffer(bytearray(base64.b64decode(line["image"])), dtype=torch.uint8)
        return decode_image(file).flatten() / 255

    painter = Painter(small, device)
    requests = [Request(label=kind % LABELS, seed=kind) for kind in range(KINDS)]
    expected = torch.cat([painter.images([request]).flatten(1) for request in requests])
    return Nearest([each.model_dump_json().encode() for each in requests], expected, OF_IMAGES, read)


SERVICES: dict[str, tuple[str, Callable[[bool, str], Nearest | Tokens]]] = {
    "classifier": ("serve_litserve.py", of_images),
    "language-model": ("serve_language_model.py", of_prompts),
    "diffusion": ("serve_diffusion.py", of_labels),
    "ray": ("serve_ray.py", of_images),
}
