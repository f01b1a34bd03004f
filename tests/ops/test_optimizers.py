"""The optimizers against torch's own loops over single tensors."""

from functools import partial

import pytest
import torch

from kfconvert import ops
from kfconvert.kernels import reference

NAMES = ["fused_adam", "fused_adamw", "fused_sgd"]
KINDS = dict(zip(NAMES, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)))
CALLS = [
    ("fused_adam", {}),
    ("fused_adam", {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}),
    ("fused_adamw", {}),
    ("fused_adamw", {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}),
    ("fused_sgd", {}),
    ("fused_sgd", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]


def parameters(dtype, device):
    torch.manual_seed(0)
    shapes = ((5, 8), (8,), (2, 3, 4), (), (0, 4))
    return [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def steps(optimizer, params, count=4):
    """``count`` steps down the sum of the squares of all parameters but the second, which has no gradient."""
    for _ in range(count):
        optimizer.zero_grad()
        sum(p.abs().square().sum() for p in [params[0], *params[2:]]).backward()
        optimizer.step()


@pytest.mark.parametrize(("name", "options"), CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_as_torch(device, name, options, dtype):
    mine, theirs = parameters(dtype, device), parameters(dtype, device)
    optimizer = getattr(ops, name)(mine, **options)
    assert all(group["fused"] and not group["foreach"] for group in optimizer.param_groups)
    assert isinstance(optimizer, KINDS[name])
    steps(optimizer, mine)
    steps(getattr(reference, name)(theirs, **options), theirs)
    tolerance = {} if dtype != torch.bfloat16 else {"rtol": 0.04, "atol": 0.02}  # four steps, each rounded
    torch.testing.assert_close(mine, theirs, **tolerance)
    assert torch.equal(mine[1], parameters(dtype, device)[1])


@pytest.mark.parametrize(("name", "options"), CALLS)
def test_falls_back_where_no_fused_kernel_is(device, name, options):
    def mixed():
        return [*parameters(torch.float32, device), torch.nn.Parameter(torch.ones(3, device=device) + 1j)]

    mine, theirs = mixed(), mixed()
    optimizer = getattr(ops, name)(mine, **options)
    assert all(group["foreach"] and not group["fused"] for group in optimizer.param_groups)
    steps(optimizer, mine)
    steps(getattr(reference, name)(theirs, **options), theirs)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_forms_of_params(device, name):
    make = getattr(ops, name)
    params = parameters(torch.float32, device)
    meta = torch.nn.Parameter(torch.ones(3, device="meta"))
    group = {"params": iter(params[1:]), "lr": 0.5}
    for given, fused, rates in (
        (iter(params), True, [0.01]),
        (((f"p{i}", p) for i, p in enumerate(params)), True, [0.01]),
        ([{"params": params[0]}, group], True, [0.01, 0.5]),
        ([{"params": params[0]}, {"params": [meta]}], False, [0.01, 0.01]),
        ([("first", params[0]), ("meta", meta)], False, [0.01]),
    ):
        optimizer = make(given, lr=0.01)
        assert [g["lr"] for g in optimizer.param_groups] == rates
        assert all(bool(g["fused"]) == fused and bool(g["foreach"]) != fused for g in optimizer.param_groups)
    assert list(group) == ["params", "lr"]


@pytest.mark.parametrize("name", NAMES)
def test_rate_as_tensor(device, name):
    params = parameters(torch.float32, device)
    rate = torch.tensor(0.05, device=device)
    steps(getattr(ops, name)(params, lr=rate), params)
    same = parameters(torch.float32, device)
    steps(getattr(ops, name)(same, lr=0.05), same)
    torch.testing.assert_close(params, same)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_counts_as_a_write(device, name):
    """Of every parameter that has a gradient, in every group, whatever the step is called by."""
    params = parameters(torch.float32, device)
    optimizer = getattr(ops, name)([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}])
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in (optimizer.step, lambda: optimizer.step(lambda: torch.zeros(())), compiled):
        optimizer.zero_grad()
        sum(p.square().sum() for p in [params[0], *params[2:]]).backward()
        before = [p._version for p in params]
        step()
        moved = [p._version > version for p, version in zip(params, before)]
        assert moved == [True, False, True, True, True]
    torch.compiler.reset()


@pytest.mark.parametrize("name", NAMES)
def test_autograd_sees_the_write(device, name):
    """A graph that was recorded before the step does not run backward on what the step made of its parameters."""
    (weight,) = params = [torch.nn.Parameter(torch.ones(3, device=device))]
    optimizer = getattr(ops, name)(params)
    y = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("name", NAMES)
def test_errors(name):
    make = getattr(ops, name)
    params = parameters(torch.float32, "cpu")
    for arguments, error, message in (
        (([],), ValueError, "empty parameter list"),
        ((params[0],), TypeError, "iterable of Tensors"),
        ((["p"],), TypeError, "can only optimize Tensors"),
        ((params, -1.0), ValueError, "Invalid learning rate"),
    ):
        with pytest.raises(error, match=message):
            make(*arguments)
    with pytest.raises(TypeError, match="fused"):
        make(params, fused=False)


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"weight_decay": 0.1, "maximize": True}, {"dampening": 0.3}]
)
def test_momentum_of_a_parameter_whose_first_gradient_comes_later(device, options):
    # A foreach step would write into the gradients, which the second step below takes as they are.
    found = []
    for make in (ops.fused_sgd, partial(torch.optim.SGD, foreach=False)):
        params = parameters(torch.float64, device)
        optimizer = make(params, lr=0.1, momentum=0.9, **options)
        steps(optimizer, params)
        params[1].grad = torch.ones_like(params[1])
        optimizer.step()
        steps(optimizer, params)
        found.append(params)
    torch.testing.assert_close(*found)


def test_momentum_of_a_parameter_whose_first_gradient_a_later_closure_makes(device):
    found = []
    for make in (ops.fused_sgd, partial(torch.optim.SGD, foreach=False)):
        params = parameters(torch.float64, device)
        optimizer = make(params, lr=0.1, momentum=0.9)
        for step in range(4):

            def closure(params=params, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = sum(parameter.square().sum() for parameter in params[: 1 + step])
                loss.backward()
                return loss

            optimizer.step(closure)
        found.append(params)
    torch.testing.assert_close(*found)
