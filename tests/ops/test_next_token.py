"""next_token_: the kernel, and the operators in its place, choose and count as those of PyTorch."""

import math

import pytest
import torch

from kfconvert.ops import next_token_

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# One word, less than a pack, several rounds of a block and a rest.
WORDS = (1, 7, 64, 4099, 50257)


class State:
    """What a step reads and writes; ``length`` tokens of each row are there."""

    def __init__(self, rows, device, length=3, finished=(), has_ids=True, parts=4):
        new = dict(device=device, dtype=torch.long)
        self.sequences = torch.arange(rows * 8, **new).view(rows, 8)
        self.length, self.least = torch.tensor([length], **new), torch.tensor([5], **new)
        self.finished = torch.tensor([row in finished for row in range(rows)], device=device)
        self.inputs, self.position = torch.zeros(rows, 1, **new), torch.tensor(length - 1, **new)
        self.ids = torch.full((rows, 1), length - 1, **new) if has_ids else None
        self.scratch = torch.zeros(2 * rows * parts + 1, **new)

    def step(self, scores, held_back=None, ends=None, pad=9):
        next_token_(
            scores, held_back, self.least, ends, pad, self.sequences, self.length, self.finished, self.inputs,
            self.position, self.ids, self.scratch,
        )  # fmt: skip

    def assert_equal(self, other):
        for name in ("sequences", "length", "finished", "inputs", "position", "ids"):
            assert getattr(self, name) is getattr(other, name) is None or torch.equal(
                getattr(self, name).cpu(), getattr(other, name).cpu()
            ), name
        assert int(self.scratch[-1]) == 0


def expected(state, scores, held_back, ends, pad):
    """As ``step``, one row after the other."""
    before, length = state.finished.tolist(), int(state.length)
    ends = None if ends is None or not ends.numel() else ends
    for row, done in enumerate(before):
        values = scores[row].double().tolist()
        if held_back is not None and length < int(state.least):
            values = [-math.inf if held else v for v, held in zip(values, held_back.tolist())]
        best = next((i for i, v in enumerate(values) if math.isnan(v)), None)
        token = pad if done and ends is not None else values.index(max(values)) if best is None else best
        state.sequences[row, length] = state.inputs[row, 0] = token
        if ends is not None and token in ends.tolist():
            state.finished[row] = True
    if ends is None or not all(before):
        state.length += 1
    state.position += 1
    if state.ids is not None:
        state.ids += 1


def check(scores, device, held_back=None, ends=None, **given):
    one, other = State(scores.shape[0], device, **given), State(scores.shape[0], device, **given)
    for _ in range(2):
        one.step(scores, held_back, ends)
        expected(other, scores, held_back, ends, 9)
        one.assert_equal(other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_score_is_taken(dtype, device):
    torch.manual_seed(0)
    for rows in (1, 3, 17):
        for words in WORDS:
            check(torch.randn(rows, words, device=device).to(dtype), device, has_ids=rows != 3)
            for parts in (1, 40):
                # Many are equal.
                check(torch.randint(3, (rows, words), device=device).to(dtype), device, parts=parts)


def test_values_that_are_not_finite(device):
    nan, inf = math.nan, math.inf
    for row in ([-inf] * 5, [0, nan, 3, nan, inf], [inf, inf, 0, 0, 0], [-inf, -inf, 0, -0.0, 0], [nan] * 5):
        check(torch.tensor([row, row[::-1]], device=device), device)


def test_rows_that_end(device):
    torch.manual_seed(0)
    scores = torch.randn(4, 100, device=device)
    first = scores.argmax(-1)
    for ends in (first[:1], first[1:3], torch.tensor([], dtype=torch.long, device=device), first):
        for finished in ((), (0,), (1, 3), range(4)):
            check(scores, device, ends=ends, finished=finished)
    check(scores, device, finished=(0, 1))  # without ends they go on


def test_what_is_held_back_until_rows_are_long_enough(device):
    torch.manual_seed(0)
    scores = torch.randn(3, 50, device=device)
    held_back = torch.rand(50, device=device) < 0.5
    held_back[scores.argmax(-1)] = True
    for length in (3, 4, 5):
        check(scores, device, held_back, length=length)
        check(scores, device, torch.ones_like(held_back), length=length)


def test_rows_with_gaps(device):
    torch.manual_seed(0)
    wide = torch.randn(3, 4, 67, device=device, dtype=torch.float16)
    check(wide[:, -1], device)
    check(wide[:, 0, 1:], device)


def test_other_shapes_and_dtypes_are_refused(device):
    scores = torch.randn(2, 5, device=device)
    for change in (
        {"finished": torch.zeros(3, dtype=torch.bool)},
        {"length": torch.ones(1)},
        {"scratch": torch.zeros(2)},
    ):
        state = State(2, device)
        vars(state).update({name: value.to(device) for name, value in change.items()})
        with pytest.raises((RuntimeError, ValueError)):
            state.step(scores)
    with pytest.raises((RuntimeError, ValueError)):
        State(2, device).step(scores[0])
