"""How a result is judged: against float64, relative to plain ATen's own error in that dtype."""

import torch

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# In float64 plain ATen is the truth that we compare with, and its own rounding errors count as ours.
FLOAT64_ULPS = 16


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


def assert_as_accurate(operator, reference, *args, factor=1.5, **kwargs):
    """max |operator - float64| <= factor x max |plain ATen - float64| + one unit in the last place of the
    largest value.

    Shapes, dtypes and the places of NaN and infinities must be those of plain ATen. Returns the output.
    """
    got = operator(*args, **kwargs)
    aten = as_tuple(reference(*args, **kwargs))
    exact = call_wide(reference, args, kwargs)
    assert len(as_tuple(got)) == len(aten)
    for mine, theirs, truth in zip(as_tuple(got), aten, exact, strict=True):
        compare(mine, theirs, truth, factor)
    return got


def compare(mine, theirs, truth, factor=1.5, measure=torch.Tensor.max, slack=0.0):
    """``measure`` makes one number of the absolute errors: the largest, or their root mean square.

    ``slack`` is what is allowed on top, relative to the largest true value.
    """
    assert mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.device == theirs.device
    if mine.numel() == 0:
        return
    finite = truth.isfinite() & theirs.isfinite()
    torch.testing.assert_close(mine.double()[~finite], theirs.double()[~finite], equal_nan=True)
    if not finite.any():
        return
    truth = truth[finite]
    error = measure((mine[finite].double() - truth).abs()).item()
    allowed = factor * measure((theirs[finite].double() - truth).abs()).item()
    ulp = torch.finfo(mine.dtype).eps * max(truth.abs().max().item(), torch.finfo(mine.dtype).tiny)
    if mine.dtype == torch.float64:
        ulp *= FLOAT64_ULPS
    ulp += slack * truth.abs().max().item()
    assert error <= allowed + ulp, f"error {error:.3e}, plain ATen {allowed / factor:.3e}, slack {ulp:.3e}"


def root_mean_square(errors):
    return errors.square().mean().sqrt()


def gradients(function, inputs, weights):
    """The gradients of sum(outputs * weights) with respect to ``inputs``."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = as_tuple(function(*leaves))
    total = sum((y * w.to(y.dtype)).double().sum() for y, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, leaves)


def assert_gradients_as_accurate(operator, reference, inputs, weights, factor=1.5, activation=None):
    """The criterion of :func:`assert_as_accurate` for the gradients of every input, on their root-mean-square
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
        compare(got, aten, exact, factor, root_mean_square, slack)
        compare(got, aten, exact, 2 * factor, slack=slack)


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
