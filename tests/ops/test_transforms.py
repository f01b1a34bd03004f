"""Derivatives that the kernels do not know (torch.func, forward mode, gradients of gradients), and tracers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.declaration import OPERATORS

# name -> (a call with the operators of a package, the shapes of its tensors)
IMAGE = [(1, 2, 4, 4), (3, 2, 3, 3), (3,), (3,), (3,)]
CALLS = {
    "gelu_dropout": (lambda p, x: p.gelu_dropout(x, 0.0), [(3, 4)]),
    "bias_dropout_add": (lambda p, x, b, r: p.bias_dropout_add(x, b, r, 0.0), [(3, 4), (4,), (3, 4)]),
    "add_layer_norm": (lambda p, x, r, w, b: p.add_layer_norm(x, r, 4, w, b), [(2, 3, 4), (3, 4), (4,), (4,)]),
    "add_rms_norm": (lambda p, x, r, w: p.add_rms_norm(x, r, 4, w), [(2, 3, 4), (3, 4), (4,)]),
    "batch_norm_relu": (
        lambda p, x, w, b: p.batch_norm_relu(x, w, b, torch.zeros_like(w), torch.ones_like(w)),
        [(2, 4, 3), (4,), (4,)],
    ),
    "softmax of some": (
        lambda p, x: p.softmax(x, mask=torch.tensor([True, False, True, True], device=x.device)),
        [(3, 4)],
    ),
    "cross_entropy": (lambda p, x: p.cross_entropy(x, classes(x), label_smoothing=0.1), [(3, 4)]),
    "cross_entropy of rows": (lambda p, x: p.cross_entropy(x, classes(x), reduction="none"), [(3, 4)]),
    "fused_linear_activation": (lambda p, x, w, b: p.fused_linear_activation(x, w, b, "silu"), [(3, 4), (5, 4), (5,)]),
    "conv2d_bn_act": (
        lambda p, x, w, b, *affine: p.conv2d_bn_act(x, w, b, torch.zeros_like(b), torch.ones_like(b), *affine, "silu"),
        IMAGE,
    ),
    "embedding_layer_norm": (
        lambda p, word, place, kind, w, b: p.embedding_layer_norm(classes(word), word, place, kind, w, b),
        [(4, 5), (3, 5), (2, 5), (5,), (5,)],
    ),
    "dequantize_int8": (
        lambda p, s: p.dequantize_int8(classes(s).to(torch.int8)[:, None].expand(3, 4), s, dtype=s.dtype),
        [(4,)],
    ),
}
# One of the functions that share an operator; their declared examples are the calls.
DECLARED = (
    "add_relu", "add_mul_exp", "mul_tanh", "geglu", "mish_scale", "bias_gelu", "prelu_bias", "layer_norm_gelu",
    "rms_norm", "group_norm_act", "softmax", "reduce_sum_squared", "reduce_mean_abs", "mse_loss", "rope", "conv_act",
    "linear_act",
)  # fmt: skip


def of_declaration(name):
    """The call of an operator's example, and the shapes of the tensors in it."""
    example = OPERATORS[name].example(torch.randn, 3, 4)

    def call(library, *tensors):
        left = iter(tensors)
        return getattr(library, name)(*(next(left) if isinstance(v, torch.Tensor) else v for v in example))

    return call, [value.shape for value in example if isinstance(value, torch.Tensor)]


CALLS |= {name: of_declaration(name) for name in DECLARED}
# Those whose backward is a compiled kernel.
WITH_BACKWARD_KERNELS = [
    "mul_tanh", "geglu", "mish_scale", "bias_gelu", "prelu_bias", "gelu_dropout", "bias_dropout_add", "layer_norm_gelu",
    "add_layer_norm", "rms_norm", "add_rms_norm", "group_norm_act", "softmax", "softmax of some", "cross_entropy",
    "cross_entropy of rows", "fused_linear_activation", "conv2d_bn_act", "batch_norm_relu", "embedding_layer_norm",
]  # fmt: skip


def classes(like):
    return torch.tensor([1, 3, 0], device=like.device)


def prepared(name, device):
    """(the operator as a function of tensors, its definition, the tensors in float64)"""
    call, shapes = CALLS[name]
    tensors = tuple(torch.randn(shape, device=device, dtype=torch.float64) for shape in shapes)
    return *(lambda *t, p=p: call(p, *t) for p in (ops, reference)), tensors


def total(function):
    """The sum of squares of all results."""

    def of(*tensors):
        outputs = function(*tensors)
        return sum(y.square().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))

    return of


def twice(tensors):
    return tuple(torch.stack((t, t + 0.1)) for t in tensors)


# Batched gradients of gradients of convolutions and of some others are loops in ATen.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode(device, name):
    operator, definition, tensors = prepared(name, device)
    tangents = tuple(torch.randn_like(t) for t in tensors)
    got, want = (torch.func.jvp(function, tensors, tangents) for function in (operator, definition))
    torch.testing.assert_close(got, want)
    with forward_ad.dual_level():
        y = operator(*map(forward_ad.make_dual, tensors, tangents))
        torch.testing.assert_close(total(lambda: y)().detach(), total(lambda: want[0])())
        for dual, tangent in zip(y if isinstance(y, tuple) else (y,), torch.utils._pytree.tree_leaves(want[1])):
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)


@pytest.mark.parametrize("name", CALLS)
def test_torch_func(device, name):
    operator, definition, tensors = prepared(name, device)
    places = tuple(range(len(tensors)))

    def mapped(function):
        return lambda *t: torch.func.vmap(total(function))(*t).sum()

    for transform, given in (
        (lambda f: torch.func.jacrev(f, places), tensors),
        (lambda f: torch.func.hessian(total(f), places), tensors),
        (torch.func.vmap, twice(tensors)),
        (lambda f: torch.func.vmap(torch.func.grad(total(f), places)), twice(tensors)),
        (lambda f: torch.func.grad(mapped(f), places), twice(tensors)),
    ):
        torch.testing.assert_close(transform(operator)(*given), transform(definition)(*given))


@pytest.mark.parametrize("name", ["mul_tanh", "layer_norm_gelu", "cross_entropy", "reduce_mean_abs"])
def test_compiled_torch_func(device, name):
    operator, _, tensors = prepared(name, device)
    for function in (torch.func.grad(total(operator)), lambda *t: torch.func.jvp(operator, t, t)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*tensors), function(*tensors))
        torch.compiler.reset()


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_gradients(device, name):
    operator, definition, tensors = prepared(name, device)
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradgradcheck(operator, leaves)
    # One tensor may be computed from another, and the gradient may need that of one alone.
    results = []
    for function in (operator, definition):
        connected = [leaves[0] * 2, *(t * leaves[0].mean() for t in leaves[1:])]
        grads = torch.autograd.grad(total(function)(*connected), leaves, create_graph=True, allow_unused=True)
        penalty = sum(g.square().sum() for g in grads if g is not None)
        results.append(torch.autograd.grad(penalty, leaves[0]))
        first, *rest = leaves
        (grad,) = torch.autograd.grad(total(function)(first, *(t.detach() for t in rest)), first, create_graph=True)
        results[-1] += torch.autograd.grad(grad.square().sum(), first)
    torch.testing.assert_close(*results)


# ATen has no second derivative of hardsigmoid.
@pytest.mark.parametrize("name", sorted({*ops.ACTIVATIONS, "mish", "exp_twice"} - {"hardsigmoid"}))
@pytest.mark.parametrize("combination", [0, 1, 2])
def test_gradients_of_gradients_of_all_combinations(device, combination, name):
    act = next(act for act in ops.activations.BY_CODE.values() if act.name == name)
    leaves = [torch.randn(5, device=device, dtype=torch.float64).requires_grad_() for _ in "xy"]

    def combined(x, y):
        return torch.ops.kfconvert.combine_act(x, y, combination, act.code, 0.2)

    def definition(x, y):
        v = act.reference((x + y, x * y, x)[combination], 0.2)
        return v * y if combination == 2 else v

    hessians = [torch.autograd.functional.hessian(total(f), tuple(leaves)) for f in (combined, definition)]
    # ATen's hardswish on CUDA rounds 1/6 to float32.
    torch.testing.assert_close(*hessians, rtol=1e-6, atol=1e-6)
    x, y = leaves
    results = []
    for function in (combined, definition):  # the same tensor twice
        (grad,) = torch.autograd.grad(total(function)(x, x), x, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), x))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_gradients_of_gradients_of_a_dropout(device):
    x, bias, residual = (torch.randn(s, device=device).double().requires_grad_() for s in ((6, 8), (8,), (6, 8)))

    def seeded(function, *arguments):
        torch.manual_seed(3)
        return function(*arguments, 0.4)

    assert torch.autograd.gradgradcheck(lambda x: seeded(ops.gelu_dropout, x), (x,))
    assert torch.autograd.gradgradcheck(lambda *t: seeded(ops.bias_dropout_add, *t), (x, bias, residual))


@pytest.mark.parametrize("name", WITH_BACKWARD_KERNELS)
def test_forward_mode_over_a_recorded_call(device, name):
    results = []
    operator, definition, tensors = prepared(name, device)
    for function, create_graph in ((operator, False), (operator, True), (definition, True)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = total(function)(*leaves)
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.ones_like(y), torch.full_like(y, 0.3))
            grads = torch.autograd.grad(y, leaves, grad, create_graph=create_graph)
            results.append([forward_ad.unpack_dual(g).tangent for g in grads])
    for result in results[:2]:
        torch.testing.assert_close(result, results[2])


class Calls(TorchDispatchMode):
    """The names of this package's operators that were called."""

    def __enter__(self):
        self.names = set()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "kfconvert":
            self.names.add(function._opname)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", WITH_BACKWARD_KERNELS)
def test_a_usual_backward_calls_the_kernel(device, name):
    operator, _, tensors = prepared(name, device)
    y = total(operator)(*(t.requires_grad_() for t in tensors))
    with Calls() as calls:
        y.backward(retain_graph=True)
    assert len(calls.names) == 1 and calls.names.pop().endswith(("_backward", "_gradients"))
    with Calls() as calls:
        torch.autograd.grad(y, tensors, create_graph=True)
    assert not calls.names


# name -> a call with a tensor (8, 100) in which elements are dropped
DROPOUTS = {
    "gelu_dropout": lambda x: ops.gelu_dropout(x, 0.5),
    "bias_dropout_add": lambda x: ops.bias_dropout_add(x, x[0], torch.zeros_like(x), 0.5),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_traced_dropouts_drop_anew_at_each_call(device, name):
    function, x = DROPOUTS[name], torch.ones(8, 100, device=device)
    traced = [make_fx(function, tracing_mode=mode)(x) for mode in ("real", "fake", "symbolic")]
    traced.append(make_fx(function, pre_dispatch=True)(x))
    traced.append(torch.jit.trace(function, (x,), check_trace=False))
    for program in traced:
        torch.manual_seed(1)
        one, two = program(x), program(x)
        torch.manual_seed(1)
        assert torch.equal(one, program(x)) and not torch.equal(one, two)
        assert 0.4 < (one == 0).double().mean() < 0.6


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("name", DROPOUTS)
def test_dropouts_under_vmap(device, name, randomness):
    x = torch.ones(2, 8, 100, device=device)
    one, two = torch.func.vmap(DROPOUTS[name], randomness=randomness)(x)
    assert torch.equal(one, two) == (randomness == "same")


def test_tensors_without_data(device):
    for inside in (True, False):
        with FakeTensorMode() as mode:
            x = torch.empty(8, 100, device=device, requires_grad=True)
            target = torch.empty(8, device=device, dtype=torch.int64)
        with mode if inside else torch.enable_grad():
            for function in (*DROPOUTS.values(), lambda x: ops.cross_entropy(x, target)):
                y = function(x)
                assert y.shape in ((8, 100), ()) and y.device.type == device
                assert torch.autograd.grad(y.sum(), x)[0].shape == (8, 100)


def test_cross_entropy_is_traced_and_mapped(device):
    x, target = torch.randn(8, 10, device=device), torch.randint(10, (8,), device=device)
    target[2] = -100
    want = reference.cross_entropy(x, target)
    for mode in ("real", "fake", "symbolic"):
        traced = make_fx(lambda x, target: ops.cross_entropy(x, target), tracing_mode=mode)(x, target)
        torch.testing.assert_close(traced(x, target), want)
    torch.testing.assert_close(torch.jit.trace(ops.cross_entropy, (x, target))(x, target), want)
    mapped = torch.func.vmap(ops.cross_entropy)(torch.stack((x, x)), torch.stack((target, target)))
    torch.testing.assert_close(mapped, torch.stack((want, want)))
