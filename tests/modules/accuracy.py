"""How accurate a fused result must be: as the composition it replaces, both measured against float64."""

import copy

import torch


def exact(module, *inputs):
    """The module's reference, computed in float64 on copies, on the CPU.

    ATen's hardswish on CUDA rounds 1/6 to float32 even in float64.
    """
    device = next(x.device for x in inputs if x is not None)
    inputs = (_wide(x) for x in inputs)
    wide = copy.deepcopy(module).double().cpu().reference(*inputs)
    return tuple(y.to(device) for y in wide) if isinstance(wide, tuple) else wide.to(device)


def _wide(x):
    if x is None:
        return None
    return x.double().cpu() if x.is_floating_point() else x.cpu()


def assert_as_accurate(actual, composition, expected):
    """``actual`` is at most 1.5 x as far from ``expected`` (float64) as ``composition`` is."""
    assert actual.dtype == composition.dtype and actual.shape == expected.shape
    if actual.numel() == 0:
        return
    rounding = torch.finfo(actual.dtype).eps * expected.abs().max()
    error, allowed = (actual.double() - expected).abs(), (composition.double() - expected).abs()
    if actual.dtype == torch.float64:
        assert error.max() <= 1.5 * allowed.max() + 32 * rounding
        return
    assert error.max() <= 1.5 * allowed.max() + 2 * rounding
    assert error.square().mean().sqrt() <= 1.5 * allowed.square().mean().sqrt() + rounding / 4


def check_strategies(module, *inputs):
    """Every strategy that applies to ``inputs`` gives the composition's shape, layout, dtype and accuracy, called and
    planned."""
    with torch.no_grad():
        expected = exact(module, *inputs)
        composition = module.reference(*inputs)
        names = module.strategies(*inputs)
        assert names[-1] == "composition" and len(set(names)) == len(names)
        for module.strategy in [*names, None]:
            for _ in range(2):
                assert_as_accurate(module(*inputs), composition, expected)
            assert_as_accurate(module.plan(*inputs)(*inputs), composition, expected)
        return names


def check_cuda_graph(module, x):
    """A captured call of every strategy that applies to ``x`` gives, replayed on other values, what a call gives."""
    with torch.no_grad():
        for module.strategy in module.strategies(x):
            module(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = module(x)
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(y, module(x))
