"""What the norms share: rows of no elements, and shapes that are symbols."""

import pytest
import torch
from support.selection import each_once, exhaustive
from torch.fx.experimental.proxy_tensor import make_fx

from kfconvert import ops

OPERATORS = torch.ops.kfconvert
EMPTY = [((3, 0), (0,)), ((2, 3, 0, 4), (0, 4)), ((3, 2, 0), (2, 0)), ((0, 4), (4,)), ((0, 3, 0), (0,))]


OPTIONS = (1e-5, ops.ACTIVATIONS["gelu"].code, 0.01)


def check_training(operator, arguments, rows):
    """The form that keeps the statistics, NaN for each row: opcheck compares with the compiler, where NaN is no NaN."""
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    outputs = operator(*arguments)
    statistics = [output for output in outputs if output.shape == (rows,)]
    assert outputs[-1].shape == (rows,) and all(values.isnan().all() for values in statistics)
    return outputs


@each_once(size=EMPTY, summed=[False, True])
def test_no_elements(device, size, summed):
    sizes, shape = size
    x, weight = (torch.randn(s, device=device, requires_grad=True) for s in (sizes, shape))
    residual = x if summed else None
    rows = torch.Size(sizes[: len(sizes) - len(shape)]).numel()
    for name, affine, offset in (("layer_norm_act", (weight, weight), ()), ("rms_norm_act", (weight,), (0.0,))):
        arguments = (x, residual, list(shape), *affine, *OPTIONS, *offset)
        outputs = check_training(getattr(OPERATORS, f"{name}_training").default, arguments, rows)
        operator = getattr(OPERATORS, f"add_{name}" if summed else name).default
        torch.library.opcheck(operator, arguments)
        grads = torch.autograd.grad(outputs[0].sum(), (x, weight))
        assert [grad.shape for grad in grads] == [x.shape, weight.shape]
        assert not grads[1].any()


@pytest.mark.parametrize("sizes", [(2, 4, 0), (0, 4, 3), (2, 0, 3)])
def test_no_elements_of_groups(device, sizes):
    x, weight = (torch.randn(s, device=device, requires_grad=True) for s in (sizes, sizes[1]))
    arguments = (x, 2, weight, weight, *OPTIONS)
    check_training(OPERATORS.group_norm_act_training.default, arguments, 2 * sizes[0])
    torch.library.opcheck(OPERATORS.group_norm_act.default, arguments)


def last(x):
    return x.shape[-1]


CALLS = {
    "layer_norm": lambda x: ops.layer_norm_act(x, last(x), activation="relu"),
    "layer_norm of two": lambda x: ops.layer_norm_act(x, x.shape[-2:]),
    "add_layer_norm": lambda x: ops.add_layer_norm(x, x * 2, (last(x),))[0],
    "rms_norm": lambda x: ops.rms_norm(x, last(x)),
    "rms_norm of two": lambda x: ops.rms_norm_act(x, x.shape[-2:], activation="silu"),
    "add_rms_norm": lambda x: ops.add_rms_norm(x, x * 2, x.shape[-1:])[1],
}


def gradient(function):
    return lambda x: torch.autograd.grad(function(x).square().sum(), x)[0]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_symbolic_shapes(device, name, requires_grad):
    function = gradient(CALLS[name]) if requires_grad else CALLS[name]
    x, other = (torch.randn(s, device=device, requires_grad=requires_grad) for s in ((5, 6, 33), (4, 7, 12)))
    traced = make_fx(function, tracing_mode="symbolic")(x)
    for given in (x, other):
        torch.testing.assert_close(traced(given), function(given))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("requires_grad", [True, *exhaustive(False)])
def test_dynamic_shapes_in_the_compiler(device, name, requires_grad):
    function, graphs = CALLS[name], []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    in_compiler = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    for sizes in ((5, 6, 33), (4, 7, 12), (3, 9, 20)):
        x = torch.randn(sizes, device=device, requires_grad=requires_grad)
        torch.testing.assert_close(in_compiler(x), function(x))
        if requires_grad:
            torch.testing.assert_close(gradient(in_compiler)(x), gradient(function)(x))
    assert len(graphs) <= 2  # not one for each size
