"""Attention of one token over a static cache: as accurate as its composition, and the cache holds what it should."""

import pytest
import torch
from accuracy import check_strategies

from kfconvert.modules import FusedDecodeAttention, FusedRMSNorm

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
MASKS = ("none", "boolean", "added", "by head", "broadcast")


def inputs(
    batch=2, heads=6, shared=3, capacity=70, size=16, mask="boolean", rotated=True, normed=False, device=None,
    dtype=None,
):  # fmt: skip
    torch.manual_seed(0)

    def new(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    # As slices of one product, whose heads do not lie together.
    q, k, v = new(batch, 1, (heads + 2 * shared) * size).split([heads * size, shared * size, shared * size], -1)
    q, k, v = (each.view(batch, 1, -1, size).transpose(1, 2) for each in (q, k, v))
    position = torch.tensor([capacity // 2], device=device)
    seen = torch.rand(batch, heads if mask == "by head" else 1, 1, capacity, device=device) < 0.6
    seen[..., capacity // 2] = True
    seen[..., capacity // 2 + 1 :] = False
    masks = {
        "boolean": seen,
        "by head": seen,
        "added": new(batch, 1, 1, capacity).masked_fill(~seen, -torch.inf),
        "broadcast": new(1, 1, 1, capacity).expand(1, heads, 1, capacity),
    }
    caches = new(batch, shared, capacity, size), new(batch, shared, capacity, size)
    found = [q, k, v, *caches, position, *([] if mask == "none" else [masks[mask]])]
    if rotated:
        angles = new(batch, 1, 1, size // 2).repeat(1, 1, 1, 2)
        found += [angles.cos(), angles.sin()]
    norms = [FusedRMSNorm(size, 1e-2, offset=0.5, device=device, dtype=dtype) for _ in range(2)] if normed else []
    with torch.no_grad():
        for norm in norms:
            norm.weight.uniform_(0, 2)
    return FusedDecodeAttention(size**-0.5, mask != "none", rotated, norms=norms), found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_every_strategy_is_as_accurate_as_the_composition(mask, dtype, device):
    module, given = inputs(mask=mask, normed=mask in ("boolean", "added"), device=device, dtype=dtype)
    names = check_strategies(module, *given)
    half = dtype in (torch.float16, torch.bfloat16)
    assert names == (["kernel"] if device.type == "cuda" else [] if half else ["sdpa"]) + ["composition"]


SMALL = [dict(shared=6, rotated=False), dict(size=6), dict(capacity=1)]
# One warp's or all of a head's elements, a cache in one part and in several.
OF_KERNELS = [
    dict(heads=16, shared=1, size=64),
    dict(batch=1, heads=32, shared=4, size=64, capacity=320),
    dict(batch=48, heads=32, shared=4, size=64, capacity=130),
    dict(batch=48, heads=40, shared=8, size=128, capacity=66),
    dict(batch=1, heads=3, shared=1, size=80, capacity=2000),
    dict(batch=90, heads=16, shared=2, size=256, capacity=9),
]


@pytest.mark.parametrize("sizes", [*SMALL, *(pytest.param(each, marks=pytest.mark.cuda) for each in OF_KERNELS)])
def test_sizes(sizes, device):
    for dtype in (torch.float32, torch.float16):
        for normed in (False, True):
            module, given = inputs(**sizes, normed=normed, device=device, dtype=dtype)
            check_strategies(module, *given)


def test_weights_of_norms_that_the_kernel_does_not_take(device):
    for change in (lambda w: w.float(), lambda w: w.repeat_interleave(2)[::2]):
        module, given = inputs(normed=True, device=device, dtype=torch.bfloat16)
        for norm in module.norms:
            norm.weight = change(norm.weight.data)
        check_strategies(module, *given)


def test_norms_that_differ_are_refused():
    for norms in (
        (FusedRMSNorm(16), FusedRMSNorm(16, eps=1e-5)),
        (FusedRMSNorm(16), FusedRMSNorm(16, elementwise_affine=False)),
        (FusedRMSNorm((1, 16)), FusedRMSNorm((1, 16))),
        (FusedRMSNorm(16, activation="silu"), FusedRMSNorm(16, activation="silu")),
        (FusedRMSNorm(16),),
    ):
        with pytest.raises(ValueError, match="cannot run in one launch"):
            FusedDecodeAttention(1.0, norms=norms)


def test_the_caches_are_written_in_place_where_that_is_asked_for(device):
    module, given = inputs(device=device)
    with torch.no_grad():
        expected = module(*given)
        for module.strategy in module.strategies(*given):
            for module.in_place in (False, True):
                caches = [each.clone() for each in given[3:5]]
                found = module(*given[:3], *caches, *given[5:])
                torch.testing.assert_close(found, expected)
                for before, cache, result in zip(given[3:5], caches, found[1:]):
                    assert (result is cache) is module.in_place
                    assert torch.equal(before, cache) is not module.in_place


@pytest.mark.cuda
def test_special_values():
    """A token that sees nothing gets 0, a NaN that is seen comes through, one that is hidden does not matter."""
    module, given = inputs(device="cuda", rotated=False)
    given[6][0] = False
    given[3][:, :, 0], given[6][:, :, :, 0] = torch.nan, False
    given[4][1, 0, 3], given[6][1, :, :, 3] = torch.nan, True
    with torch.no_grad():
        y = module(*given)[0]
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    heads = y.shape[1] // given[3].shape[1]
    assert y[1, :heads].isnan().all() and y[1, heads:].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("place", [-1, 70, 10**9])
def test_a_place_that_the_cache_does_not_have_is_not_written_to(place):
    module, given = inputs(device="cuda")
    module.in_place, given[5] = True, torch.tensor([place], device="cuda")
    before = [each.clone() for each in given[3:5]]
    with torch.no_grad():
        assert module(*given)[0].isfinite().all()
    assert all(map(torch.equal, before, given[3:5]))


@pytest.mark.parametrize("is_aligned", [True, False])
def test_caches_without_aligned_words(is_aligned, device):
    module, given = inputs(device=device, dtype=torch.float16)
    numel = given[3].numel()
    memory = torch.empty(numel + 8, device=device, dtype=torch.float16)
    given[3] = memory[8 if is_aligned else 1 :][:numel].view_as(given[3]).copy_(given[3])
    check_strategies(module, *given)


@pytest.mark.cuda
@pytest.mark.parametrize("change", range(6))
def test_what_does_not_fit_is_one_clear_line(change):
    module, given = inputs(device="cuda", rotated=False)
    wrong = [
        lambda g: g.__setitem__(1, g[1][:, :1]),
        lambda g: g.__setitem__(3, g[3].half()),
        lambda g: g.__setitem__(5, g[5].int()),
        lambda g: g.__setitem__(6, g[6][..., 1:]),
        lambda g: g.__setitem__(0, g[0].expand(-1, -1, 2, -1)),
        lambda g: g.__setitem__(slice(5), [each[..., :6] for each in g[:5]]),
    ][change]
    wrong(given)
    with pytest.raises(RuntimeError, match="kfconvert::decode_attention_: "):
        torch.ops.kfconvert.decode_attention_(*given, None, None, None, None, 0.0, 0.0, 1.0)
