"""How accurate a fused result must be: as the composition it replaces, both measured against float64."""

import copy

import torch
from support.accuracy import assert_as_accurate

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
        expected = exact(module, *inputs)
        composition = module.reference(*inputs)
        names = module.strategies(*inputs)
        assert names[-1] == "composition" and len(set(names)) == len(names)
        for module.strategy in [*names, None]:
            for _ in range(2):
                assert_as_accurate(module(*inputs), composition, expected, ulps=ULPS)
            assert_as_accurate(module.plan(*inputs)(*inputs), composition, expected, ulps=ULPS)
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
