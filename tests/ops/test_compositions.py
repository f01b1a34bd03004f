"""Every operator without a compiled library: outputs and gradients are the kernel's and those of plain ATen.

A machine without a library comes to the compositions by ``torch.ops``, as a loaded or compiled program does. Here they
take the place of the compiled kernels, so that the public functions and the registered backward passes run on them.
What is tried follows from the registry of operators and the signatures of the public functions: a new operator is tried
without being named.
"""

from contextlib import contextmanager

import pytest
import torch
from operator_calls import NAMES, base, drops, plain_aten, results, variants
from torch._subclasses.fake_tensor import FakeTensorMode

from kfconvert import extension

OPERATORS = sorted(
    name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("kfconvert::")
)
# A backend that has no kernels here, and so takes the registered composition of each operator.
WITHOUT_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

needs_kernels = pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="no compiled kernels to compare with")


@contextmanager
def compositions():
    """Within the block the compositions stand for the compiled CPU kernels; gives the names of those that ran."""
    ran = set()

    def composition(name):
        operator = getattr(torch.ops.kfconvert, name).default

        def call(*args, **kwargs):
            ran.add(name)
            return operator.redispatch(WITHOUT_KERNELS, *args, **kwargs)

        return call

    with torch.library._scoped_library("kfconvert", "IMPL") as library:
        for name in OPERATORS:
            library.impl(name, composition(name), "CPU", allow_override=True)
        yield ran


def bias_in_place():
    """What the one operator writes that no public function calls."""
    x, bias, residual = (torch.linspace(-1, 2, size).double() for size in (24, 6, 24))
    x, residual = x.view(4, 6), residual.view(4, 6).sin()
    torch.ops.kfconvert.bias_act_(x, bias, residual, 2, 0.2, -1)
    return x


def decode_attention():
    """Likewise, for steps of generation."""
    q, k, v = (torch.linspace(-1, 2, 2 * heads * 4).double().sin().view(2, heads, 1, 4) for heads in (4, 2, 2))
    keys, values, angles = (
        torch.ones(2, 2, 5, 4).double(),
        torch.zeros(2, 2, 5, 4).double(),
        torch.ones(1, 1, 1, 4).double(),
    )
    seen = torch.tensor([True, False, True, True, False]).view(1, 1, 1, 5)
    y = torch.ops.kfconvert.decode_attention_(
        q, k, v, keys, values, torch.tensor([3]), seen, angles.cos(), angles.sin(), 0.5
    )
    return y, keys, values


def skinny_linear():
    x, weight = (torch.linspace(-1, 2, size).double().sin() for size in (12, 24))
    return torch.ops.kfconvert.skinny_linear(x.view(3, 4), weight.view(6, 4), x[:6], 2, 0.01, True, False)


def next_token():
    rows = [torch.zeros(size, dtype=torch.long) for size in ((2, 4), (1,), (2, 1), (), (3,))]
    sequences, length, inputs, position, scratch = rows
    finished, ends = torch.zeros(2, dtype=torch.bool), torch.ones(1, dtype=torch.long)
    torch.ops.kfconvert.next_token_(
        torch.eye(2, 5), None, length.clone(), ends, 0, sequences, length, finished, inputs, position, None, scratch
    )


def tried(name):
    """(the public function, its arguments) of each call to try; of none where torch's operators do it all."""
    function, arguments = base(name)
    with compositions() as ran:
        function(**arguments)
    for given in variants(function, arguments) if ran else ():
        yield function, given


def assert_close(actual, expected):
    # ATen's gradients of hardswish and hardsigmoid round 1/6 to float32 even in float64.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def assert_slopes(function, given, gradients):
    """The gradients are those of the outputs, by finite differences, where plain ATen drops other elements."""
    names = [name for name, gradient in gradients.items() if gradient is not None]

    def seeded(*leaves):
        torch.manual_seed(1)
        return function(**given | dict(zip(names, leaves)))

    assert torch.autograd.gradcheck(seeded, [given[name].clone().requires_grad_() for name in names], fast_mode=True)


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_as_the_kernels_and_as_plain_aten(name):
    for function, given in tried(name):
        compiled = results(function, given)
        with compositions():
            composed = results(function, given)
            assert_close(composed, compiled)
            if drops(function, given):
                assert_slopes(function, given, composed[1])
                continue
            with torch.no_grad():
                assert_close(results(function, given)[0], composed[0])
        with plain_aten():
            assert_close(composed, results(function, given))


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_fake_kernels_give_the_layout_of_the_kernels(name):
    for function, given in tried(name):
        real = results(function, given)
        with FakeTensorMode() as mode:
            fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            fake = results(function, fakes)
        assert layouts(fake) == layouts(real), given


def layouts(values):
    tensors = (value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, torch.Tensor))
    return [(tuple(t.shape), t.dtype, t.stride()) for t in tensors]


@needs_kernels
def test_every_operator_is_tried():
    """If not, add a call that comes to it to operator_arguments, or to MORE."""
    with compositions() as ran:
        for function, given in map(base, NAMES):
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    results(function, given)
        bias_in_place()
        decode_attention()
        skinny_linear()
        next_token()
    twins = {f"{name}_inference" for name in ran} | {name.removesuffix("_inference") for name in ran}
    assert not set(OPERATORS) - ran - twins  # which share their composition


@needs_kernels
def test_in_place():
    compiled = bias_in_place()
    with compositions() as ran:
        assert_close(bias_in_place(), compiled)
    assert ran == {"bias_act_"}
