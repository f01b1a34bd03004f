"""How the result of an operator is judged: as accurate as its reference, both against float64."""

import torch
from support.accuracy import assert_as_accurate

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def as_tuple(output):
    return output if isinstance(output, tuple) else (output,)


def assert_replays_see_all_writes(chain, change):
    """A replay of ``chain``, a call of kernels that overlap, computes what launches do after each ``change``."""
    with torch.no_grad():
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = chain()
        for _ in range(20):
            change()
            graph.replay()
            assert torch.equal(recorded, chain())


def widen(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.double().cpu() if value.is_floating_point() else value.cpu()


def call_wide(function, args, kwargs):
    """In float64 on the CPU: ATen's hardswish on CUDA rounds 1/6 to float32 even there."""
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    exact = function(*(widen(a) for a in args), **{k: widen(v) for k, v in kwargs.items()})
    return tuple(output.to(device) for output in as_tuple(exact))


def check_operator(operator, reference, *args, factor=1.5, **kwargs):
    """Every output of ``operator`` is as accurate as that of ``reference``. Returns the outputs."""
    got = operator(*args, **kwargs)
    aten = as_tuple(reference(*args, **kwargs))
    exact = call_wide(reference, args, kwargs)
    assert len(as_tuple(got)) == len(aten)
    for mine, theirs, truth in zip(as_tuple(got), aten, exact, strict=True):
        assert_as_accurate(mine, theirs, truth, factor)
    return got


def assert_one_graph(function, inputs):
    """torch.compile traces ``function`` once for all ``inputs``, of different sizes, and changes no result."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()  # a function may have been traced too often already, for other devices and options
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for x in inputs:
        torch.testing.assert_close(compiled(x), function(x))
    assert len(graphs) == 1
