"""next_token_: selects the token with the largest score of each row, and writes it to the inputs of the next step.

On CUDA, one launch replaces about twenty small launches.
"""

import torch

from ..registration import define, require

_SCORES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _check(scores, held_back, least, ends, pad, sequences, length, finished, inputs, position, position_ids, scratch):
    operator = "next_token_"
    rows, words = scores.shape if scores.dim() == 2 else (0, 0)
    require(rows > 0 and words > 0, operator, "scores must have rows of one word or more")
    require(scores.dtype in _SCORES, operator, f"scores must have a floating-point dtype, got {scores.dtype}")
    for name, tensor, shape, dtype in (
        ("held_back", held_back, (words,), torch.bool),
        ("least", least, (1,), torch.long),
        ("ends", ends, None, torch.long),
        ("sequences", sequences, (rows, sequences.shape[-1]), torch.long),
        ("length", length, (1,), torch.long),
        ("finished", finished, (rows,), torch.bool),
        ("inputs", inputs, (rows, 1), torch.long),
        ("position", position, (), torch.long),
        ("position_ids", position_ids, (rows, 1), torch.long),
        ("scratch", scratch, None, torch.long),
    ):
        if tensor is not None:
            fits = tensor.dtype == dtype and shape in (None, tuple(tensor.shape))
            require(fits, operator, f"{name} must have dtype {dtype} and shape {shape}")
    parts, odd = divmod(scratch.numel() - 1, 2 * rows)
    require(parts > 0 and odd == 0, operator, "scratch must have 2 * rows * parts + 1 elements")


def _compose(scores, held_back, least, ends, pad, sequences, length, finished, inputs, position, position_ids, scratch):
    _check(scores, held_back, least, ends, pad, sequences, length, finished, inputs, position, position_ids, scratch)
    if held_back is not None:
        scores = torch.where(held_back & (length < least), -torch.inf, scores)
    tokens = scores.argmax(-1)
    may_end = ends is not None and ends.numel() > 0
    if may_end:
        tokens = torch.where(finished, pad, tokens)
    sequences.index_copy_(1, length, tokens[:, None])
    length.add_(~finished.all() if may_end else 1)
    if may_end:
        finished.logical_or_(torch.isin(tokens, ends))
    inputs.copy_(tokens[:, None])
    position.add_(1)
    if position_ids is not None:
        position_ids.add_(1)


# scores: (rows, words). Words in held_back, boolean (words,), count as -inf while length is below least; both int64 of
# shape (1,). ends: int64 (any,), tokens that set finished, boolean (rows,), of a row, which then gets pad; None or
# empty if only the length ends rows. sequences: int64 (rows, width), receives the tokens in column length, which is
# incremented unless all rows had finished. inputs: int64 (rows, 1), receives the tokens too. position, int64 of shape
# (), and position_ids (rows, 1) are incremented. scratch: int64 (2 * rows * parts + 1,), initially zeros; up to parts
# blocks of a kernel read a row. Of equal scores the first word wins, and NaN is larger than all numbers.
next_token_ = define(
    "next_token_(Tensor scores, Tensor? held_back, Tensor least, Tensor? ends, int pad, Tensor(a!) sequences, "
    "Tensor(b!) length, Tensor(c!) finished, Tensor(d!) inputs, Tensor(e!) position, Tensor(f!)? position_ids, "
    "Tensor(g!) scratch) -> ()",
    _compose,
    lambda *arguments: _check(*arguments),
)
