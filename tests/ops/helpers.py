"""How the result of an operator is judged: as accurate as its reference, both against float64."""

import torch
from support.accuracy import assert_as_accurate

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def as_tuple(output):
    return output if isinstance(output, tuple) else (output,)


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


def gradients(function, inputs, weights):
    """The gradients of sum(outputs * weights) with respect to ``inputs``."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = as_tuple(function(*leaves))
    total = sum((y * w.to(y.dtype)).double().sum() for y, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, leaves)


def check_gradients(operator, reference, inputs, weights, factor=1.5, activation=None):
    """The criterion of :func:`check_operator` for the gradients of every input, on their root-mean-square
    error.

    A gradient is a chain of roundings, and which of two equally good chains has the larger worst element is
    chance: the largest error may be 3 times that of plain ATen.
    """
    # ATen's gradients of these round 1/6 to float32 even in float64: there they are no measure of the truth.
    rough = activation in ("hardsigmoid", "hardswish") and inputs[0].dtype == torch.float64
    slack = 1e-7 if rough else 0.0
    mine = gradients(operator, inputs, weights)
    theirs = gradients(reference, inputs, weights)
    truth = gradients(reference, [x.double() for x in inputs], [w.double() for w in weights])
    for got, aten, exact in zip(mine, theirs, truth, strict=True):
        assert_as_accurate(got, aten, exact, (2 * factor, factor), slack)


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
