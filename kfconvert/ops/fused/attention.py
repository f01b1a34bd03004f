"""attention_triton: ``softmax(q k^T scale + sum of terms) v`` for few keys, without gradients."""

import torch

from ..registration import define

_MOST_KEYS, _MOST_ELEMENTS = 256, 2**14  # of keys or values of one head, which stay in shared memory and registers


def keeps_keys(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether Triton's kernel can keep all keys, as wide as q (..., N, D), and all values v (..., M, E) of a head."""
    keys, width = v.shape[-2], max(q.shape[-1], v.shape[-1])
    return 0 < keys <= _MOST_KEYS and padded(keys) * padded(width) <= _MOST_ELEMENTS


def padded(size: int) -> int:
    """Returns the next power of two, and 16 at least: the smallest tile of tensor cores."""
    return max(16, 1 << (size - 1).bit_length())


def _plain(q, k, v, terms, scale):
    weights = torch.softmax(sum(terms, torch.matmul(q, k.transpose(-1, -2)) * scale), -1)
    return torch.matmul(weights, v).transpose(2, 3).contiguous().transpose(2, 3)


# q: (B, S, H, N, D), k: (B, S, H, M, D), v: (B, S, H, M, E), terms: (B, S, H, N, M). B, S and H of k and v may be 1,
# and all sizes of terms. Returns (B, S, H, N, E), in memory (B, S, N, H, E). kernels.triton has its kernel for CUDA and
# the half types.
attention_triton = define(
    "attention_triton(Tensor q, Tensor k, Tensor v, Tensor[] terms, float scale) -> Tensor", _plain
)
