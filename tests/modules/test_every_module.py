"""What holds for each fused module, on the examples that the classes declare."""

import copy
import pickle

import pytest
import torch
from accuracy import check_cuda_graph, check_special_values, check_strategies
from every_module import CLASSES, EXAMPLES, MAIN, example, replace_tensors
from support.selection import each_once
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from kfconvert import modules

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WITH_TENSORS = [name for name in MAIN if example(name)[0].sources()]


def test_every_class_declares_an_example_of_itself():
    declared = {cls for cls, _ in EXAMPLES.values() if cls in CLASSES}
    every = {getattr(modules, name) for name in modules.__all__}
    kinds = {kind for kind in every if isinstance(kind, type) and issubclass(kind, nn.Module)}
    assert kinds == declared | {modules.FusedModule, modules.FusedTransformerLayer}
    assert all(type(example(name)[0]) is cls for name, (cls, _) in EXAMPLES.items())


@each_once(name=EXAMPLES, dtype=DTYPES)
def test_every_strategy_is_as_accurate_as_the_composition(name, dtype, device):
    module, inputs = example(name, device, dtype)
    check_strategies(module, *inputs)
    # With gaps between the elements of the inputs.
    check_strategies(module, *(torch.stack((x, x), -1)[..., 0] for x in inputs))


@pytest.mark.parametrize("name", MAIN)
def test_special_values(name, device):
    module, inputs = example(name, device)
    inputs[0][(0,) * inputs[0].dim()] = torch.nan
    check_special_values(module, *inputs)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(duplicate, name, device):
    module, inputs = example(name, device)
    module.strategy = module.strategies(*inputs)[-1]
    with torch.no_grad():
        expected = module(*inputs)
        copied = duplicate(module)
        assert repr(copied) == repr(module) and copied.training == module.training
        torch.testing.assert_close(copied(*inputs), expected)
        for tensor in copied.sources():
            tensor.zero_()
        torch.testing.assert_close(module(*inputs), expected)


def write(module):
    with torch.no_grad():
        for tensor in module.sources():
            tensor.add_(1)


def load(module):
    module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()})


def swap_data(module):
    for tensor in module.sources():
        tensor.data = tensor.data + 1


def replace(module):
    replace_tensors(module, lambda tensor: tensor + 1)


def replace_by_plain_tensors(module):
    for inner in module.modules():
        for name in list(inner._parameters) if isinstance(inner, modules.FusedModule) else ():
            if inner._parameters[name] is not None:
                setattr(inner, name, inner._parameters[name].detach() + 1)


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_a_live_strategy_that_does_not_apply_is_replaced_by_a_live_one(name, monkeypatch):
    """Programs do not watch the weights of these, and the artifact may be from a machine with other kernels."""
    module, inputs = example(name)
    for module.strategy in module.live_strategies:
        assert module.choose(*inputs) in module.live_strategies
    monkeypatch.setattr(type(module), "strategies", lambda *_: ["mkl", "onednn", "merged", "composition"])
    for module.strategy in module.live_strategies:
        assert module.choose(*inputs) == "composition"


@pytest.mark.parametrize("change", [write, load, swap_data, replace, replace_by_plain_tensors])
@pytest.mark.parametrize("name", WITH_TENSORS)
def test_follows_its_tensors(name, change, device):
    module, inputs = example(name, device)
    for module.strategy in module.strategies(*inputs):
        module = copy.deepcopy(module)
        with torch.no_grad():
            module(*inputs)
            change(module)
            torch.testing.assert_close(module(*inputs), module.reference(*inputs))


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_follows_an_optimizer_and_a_change_of_dtype(name, device):
    module, inputs = example(name, device)
    for module.strategy in module.strategies(*inputs):
        with torch.no_grad():
            before = tree_leaves(module(*inputs))
        sum(y.square().sum() for y in tree_leaves(module(*inputs))).backward()
        torch.optim.SGD(module.parameters(), lr=1e-3).step()
        module.zero_grad()
        with torch.no_grad():
            assert not torch.equal(tree_leaves(module(*inputs))[0], before[0])
            torch.testing.assert_close(module(*inputs), module.reference(*inputs), rtol=1e-4, atol=1e-4)
            wide = [x.double() if x.is_floating_point() else x for x in inputs]
            module.double()
            torch.testing.assert_close(module(*wide), module.reference(*wide))
            module.float()
            torch.testing.assert_close(module(*inputs), module.reference(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAIN)
def test_gradients(name, device):
    module, inputs = example(name, device, torch.float64)
    with torch.inference_mode():
        module(*inputs)  # what is packed or folded now must not be used
    floats = [x.clone().requires_grad_() for x in inputs if x.is_floating_point()]
    names, parameters = [name for name, _ in module.named_parameters()], list(module.parameters())

    def call(*tensors):
        given = iter(tensors[: len(floats)])
        values = dict(zip(names, tensors[len(floats) :], strict=True))
        return torch.func.functional_call(
            module, values, tuple(next(given) if x.is_floating_point() else x for x in inputs)
        )

    assert torch.autograd.gradcheck(call, (*floats, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", MAIN)
def test_compilers_and_autocast(name, device):
    module, inputs = example(name, device)
    with torch.no_grad():
        expected = module.reference(*inputs)
        torch.compiler.reset()
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-5, atol=1e-5)
        exported = torch.export.export(module, inputs, strict=False)
        torch.testing.assert_close(exported.module()(*inputs), expected, rtol=1e-5, atol=1e-5)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            results, wanted = module(*inputs), module.reference(*inputs)
            torch.testing.assert_close(results, wanted, rtol=0.05, atol=0.1, check_dtype=False)


@torch.no_grad()
@pytest.mark.parametrize("change", ["columns of a matrix", "one number for all", "transposed"])
@pytest.mark.parametrize("name", WITH_TENSORS)
def test_tensors_with_any_strides(name, change, device):
    def laid_out(tensor):
        if change == "columns of a matrix":
            return torch.stack((tensor, torch.full_like(tensor, torch.nan)), -1)[..., 0]
        if change == "one number for all":
            return tensor.flatten()[:1].reshape([1] * tensor.dim()).expand(tensor.shape)
        return tensor.permute(*range(tensor.dim())[::-1]).contiguous().permute(*range(tensor.dim())[::-1])

    module, inputs = example(name, device)
    replace_tensors(module.requires_grad_(False), laid_out)
    for module.strategy in module.strategies(*inputs):
        for _ in range(2):
            torch.testing.assert_close(module(*inputs), module.reference(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MAIN)
def test_transforms(name, device):
    """Packed and folded weights know nothing of torch.func and forward mode."""
    module, inputs = example(name, device)
    module.requires_grad_(False)
    places = [index for index, x in enumerate(inputs) if x.is_floating_point()]
    floats = tuple(inputs[index] for index in places)

    def of_floats(function):
        def call(*tensors):
            given = list(inputs)
            for index, tensor in zip(places, tensors):
                given[index] = tensor
            return function(*given)

        return call

    def total(function):
        return lambda *tensors: sum(y.square().sum() for y in tree_leaves(function(*tensors)))

    grad = torch.func.grad
    every = tuple(range(len(floats)))
    for transform, given in (
        (lambda f: lambda *t: torch.func.jvp(f, t, floats), floats),
        (lambda f: grad(total(f), every), floats),
        (lambda f: torch.func.vmap(grad(total(f), every)), tuple(torch.stack((t, -t)) for t in floats)),
    ):
        with sdpa_kernel(SDPBackend.MATH):  # the others have no forward mode
            want = transform(of_floats(module.reference))(*given)
            module(*inputs)
            torch.testing.assert_close(transform(of_floats(module))(*given), want, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAIN)
def test_cuda_graph(name, dtype):
    module, inputs = example(name, "cuda", dtype)
    check_cuda_graph(module, *inputs)
