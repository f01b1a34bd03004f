"""How accurate a fused result must be: as the composition it replaces, both measured against float64."""

import copy

import torch
from support.accuracy import assert_as_accurate
from torch.utils._pytree import tree_leaves

# A module is a chain of operators, and which of two equally good chains has the larger worst element is chance.
ULPS = (2.0, 0.25)


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


def check_strategies(module, *inputs):
    """Every strategy that applies to ``inputs`` gives the composition's shape, layout, dtype and accuracy, called and
    planned."""
    with torch.no_grad():
        expected = tree_leaves(exact(module, *inputs))
        composition = tree_leaves(module.reference(*inputs))
        names = module.strategies(*inputs)
        assert names[-1] == "composition" and len(set(names)) == len(names)
        for module.strategy in [*names, None]:
            for call in (module, module, module.plan(*inputs)):
                results = tree_leaves(call(*inputs))
                for result, plain, true in zip(results, composition, expected, strict=True):
                    assert_as_accurate(result, plain, true, ulps=ULPS)
        return names


def places(y):
    """0 where ``y`` is finite; otherwise a NaN or the infinity itself."""
    return torch.where(y.isfinite(), 0.0, y.double())


def check_special_values(module, *inputs, expected=()):
    """Every strategy's NaN and infinities are the reference's, which must have some NaN."""
    with torch.no_grad():
        composition, truth = (tree_leaves(each) for each in (module.reference(*inputs), exact(module, *inputs)))
        truth = [places(y) for y in truth]
        assert any(y.isnan().any() for y in truth) and not all(y.isnan().all() for y in truth)
        # ATen's vectorised float32 erf GELU makes a NaN of +inf, its scalar one does not: either will do.
        either = [(y == float("inf")) & (module.activation == "gelu") for y in truth]
        names = module.strategies(*inputs)
        assert set(expected) <= set(names)
        results = [composition]
        for module.strategy in names:
            results += [tree_leaves(module(*inputs)) for _ in range(2)]
        for result in results:
            for y, true, loose in zip(map(places, result), truth, either):
                torch.testing.assert_close(y[~loose], true[~loose], rtol=0, atol=0, equal_nan=True)
                assert (y[loose].isnan() | (y[loose] == float("inf"))).all()


def check_cuda_graph(module, x, *others):
    """A captured call of every strategy that applies to the inputs gives, replayed on other values, what a call
    gives."""
    with torch.no_grad():
        for module.strategy in module.strategies(x, *others):
            module(x, *others)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = module(x, *others)
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(y, module(x, *others))
