"""decode_attention_: attention of one new token over a cache of keys and values, which is updated with the token.

On CUDA, one launch normalizes and rotates queries and keys, writes to the cache and reads its visible part once (flash
decoding).
"""

import torch
import torch.nn.functional as F

from ..registration import define, require
from .rms_norm_act import reference as normalize
from .rotary import reference as rotate


def _check(q, k, v, keys, values, position, mask, cos, sin, q_norm, k_norm):
    operator = "decode_attention_"
    batch, heads, _, size = q.shape if q.dim() == 4 else (0, 0, 0, 0)
    shared = keys.shape[1] if keys.dim() == 4 else 0
    require(q.dim() == 4 and q.shape[2] == 1, operator, "q must have one row of each head")
    require(shared > 0 and heads % shared == 0, operator, f"{shared} heads of keys for {heads} of queries")
    for name, tensor in (("k", k), ("v", v)):
        require(tuple(tensor.shape) == (batch, shared, 1, size), operator, f"{name} has another shape than q")
    require(keys.shape == values.shape == (batch, shared, keys.shape[2], size), operator, "the cache has another shape")
    require(position.numel() == 1 and position.dtype == torch.long, operator, "position must be one number, int64")
    require((cos is None) == (sin is None), operator, "cos and sin belong together")
    require((q_norm is None) == (k_norm is None), operator, "q_norm and k_norm belong together")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        fits = weight is None or (tuple(weight.shape) == (size,) and weight.dtype == q.dtype)
        require(fits, operator, f"{name} must have the size of a head and the dtype of q")
    if mask is not None:
        require(mask.dtype in (torch.bool, q.dtype), operator, "mask must be boolean or have the dtype of q")


def attended(q, keys, values, mask, scale):
    """Computes attention in plain ATen, with each head of keys shared by neighboring heads of q."""
    repeats = q.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = (each.repeat_interleave(repeats, 1) for each in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)


def written(q, k, v, keys, values, position, cos, sin, in_place):
    """Returns q, rotated if there are angles, and the caches or their copies, updated with k and v."""
    if cos is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    put = torch.Tensor.index_copy_ if in_place else torch.Tensor.index_copy
    place = position.reshape(1)
    return q, put(keys, 2, place, k), put(values, 2, place, v)


def _compose(q, k, v, keys, values, position, mask, cos, sin, q_norm, k_norm, eps, offset, scale):
    _check(q, k, v, keys, values, position, mask, cos, sin, q_norm, k_norm)
    if q_norm is not None:
        q, k = (normalize(x, q_norm.shape, w, eps, offset=offset) for x, w in ((q, q_norm), (k, k_norm)))
    q, keys, values = written(q, k, v, keys, values, position, cos, sin, in_place=True)
    return attended(q, keys, values, mask, scale).contiguous()


# q, k, v: (batch, heads, 1, size), with fewer heads of k and v if neighbors of q share them; keys, values: (batch,
# heads, capacity, size); position: one int64; mask: (batch, heads, 1, capacity), boolean (True is visible) or added;
# cos and sin: (batch, 1, 1, size); q_norm and k_norm: (size,), weights of RMS norms before the rotation, with eps and
# offset as in rms_norm_act. Returns (batch, heads, 1, size), dense, 0 if nothing is visible. No gradients.
decode_attention_ = define(
    "decode_attention_(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor position, "
    "Tensor? mask, Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, float eps, float offset, float scale) "
    "-> Tensor",
    _compose,
)
