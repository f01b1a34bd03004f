"""Recorded training steps give the losses, gradients and parameters of the original, in whatever order calls come.

On the CPU, a stand-in for a CUDA graph launches the operators again, and TorchInductor compiles nothing.
"""

import copy
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.devices import CUDA, DEVICES
from support.selection import exhaustive
from support.small_models import guard
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kfconvert.conversion import leave_as_it_is
from kfconvert.training import cuda_recording, recorded

cuda_only = pytest.mark.parametrize("device", [CUDA])
on_both = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def replays(monkeypatch, device):
    """The recordings that calls replayed. All graphs are recorded, even if their launches take little time."""
    found, replay = [], cuda_recording.Recording.replay

    def counted(self, *args):
        found.append(self)
        return replay(self, *args)

    torch._dynamo.reset()
    monkeypatch.setattr(recorded, "_LAUNCH_SHARE", 0.0)
    monkeypatch.setattr(cuda_recording.Recording, "replay", counted)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if device == "cpu":
        stand_in(monkeypatch)
    return found


class Uncompiled:
    """For ``CompiledFxGraph``: calls the operators of the graph."""

    def __init__(self, module, inputs, **options):
        self._boxed_call, self.disabled_cudagraphs_reason = True, None
        places = {node: index for index, node in enumerate(module.graph.find_nodes(op="placeholder"))}
        written = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        self.mutated_input_idxs = {places[node.args[0]] for node in written if node.args[0] in places}
        self.current_callable, self._module = self._run, module

    def __call__(self, arguments):
        return self.current_callable(arguments)

    def _run(self, arguments):
        given = list(arguments)
        arguments.clear()
        return self._module(*given)


class Repeated(cuda_recording.Recording):
    def __init__(self, launch, arguments, *options):
        self._launch = launch
        super().__init__(self._without_effects, arguments, *options)
        self._graph = SimpleNamespace(replay=self._launch_again)

    def _without_effects(self, arguments):
        self._arguments, before = list(arguments), [each.clone() for each in arguments]
        results = self._launch(arguments)
        for each, value in zip(self._arguments, before):
            each.data.copy_(value)  # unlike an operator on ``each``, this leaves its version
        return results

    def _launch_again(self):
        kept = {each.untyped_storage().data_ptr() for each in self._arguments}
        for each, value in zip(self.results, self._launch(list(self._arguments))):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in kept:
                each.copy_(value)


def stand_in(monkeypatch):
    monkeypatch.setattr(recorded, "Recording", Repeated)
    monkeypatch.setattr(recorded, "CompiledFxGraph", Uncompiled)
    monkeypatch.setattr(recorded.compile_fx, "compile_fx_inner", Uncompiled)
    monkeypatch.setattr(recorded, "is_recordable", lambda inputs: all(isinstance(each, Tensor) for each in inputs))
    monkeypatch.setattr(recorded._Forward, "_measured", lambda self, arguments: self._launch(arguments))
    monkeypatch.setattr(cuda_recording, "_capture", lambda stream, pool: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for name, value in {"current_stream": 0, "graph_pool_handle": 0, "is_current_stream_capturing": False}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


class Net(nn.Module):
    """A convolution with batch norm, then linear layers; ``dropout`` is between these."""

    def __init__(self, dropout=0.0, broken=False):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.last, self.dropout, self.broken = nn.Linear(8, 32), nn.Linear(32, 5), dropout, broken

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        if self.broken:
            torch._dynamo.graph_break()
        return self.last(F.dropout(F.gelu(self.first(x)), self.dropout))


def images(model, seed, batch=4):
    """On the device of ``model``."""
    found = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return found.to(next(model.parameters()).device)


def pair(device, make=Net, **config):
    """A model, and a copy that trains compiled."""
    torch.manual_seed(0)
    original = make().to(device)
    fused = copy.deepcopy(original)
    leave_as_it_is(fused, {"config": {"training": True, **config}})
    return original.train(), fused.train()


def loss(model, seed, batch=4):
    return model(images(model, seed, batch)).square().mean()


def assert_same(original, fused):
    for own, other in zip(original.parameters(), fused.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(original.state_dict(), fused.state_dict(), rtol=1e-4, atol=1e-6)


def accumulated(model, seed):
    for call in range(3):
        loss(model, 3 * seed + call).backward()


def summed(model, seed):
    (loss(model, seed) + model(images(model, seed + 50)).abs().mean()).backward()


def reversed_order(model, seed):
    first, second = loss(model, seed), loss(model, seed + 50)
    first.backward()
    second.backward()


def retained(model, seed):
    value = loss(model, seed)
    value.backward(retain_graph=True)
    if seed % 2:
        loss(model, seed + 50).backward()
    value.backward()


def without_backward(model, seed):
    loss(model, seed + 50)
    kept = loss(model, seed + 60)
    loss(model, seed).backward()
    del kept


def without_gradients(model, seed):
    with torch.no_grad():
        model(images(model, seed + 50))
    loss(model, seed).backward()


def of_other_sizes(model, seed):
    loss(model, seed, 6 if seed in (6, 8) else 4).backward()


def moved(model, seed):
    if seed in (4, 7):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    loss(model, seed).backward()


def with_gradients_of_inputs(model, seed):
    x = images(model, seed).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), [x], retain_graph=True)
    model(x + grad).square().mean().backward()


def checkpointed(model, seed):
    checkpoint(model, images(model, seed), use_reentrant=False).square().mean().backward()


def under_hooks(model, seed):
    """Which keep some saved tensors, and copy others."""

    def pack(tensor):
        return tensor.clone() if tensor.numel() <= 64 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) if seed > 5 else nullcontext():
        first, second = loss(model, seed), loss(model, seed + 50)
    (first + second).backward()


def of_weights(model, seed):
    """The recorded call has a weight as its input."""
    x = model.conv.weight.detach() if seed == 3 else images(model, seed, 8)[..., :3, :3]
    model(x).square().mean().backward()


def of_expanded_images(model, seed):
    model(images(model, seed, 1).expand(4, 3, 8, 8)).square().mean().backward()


def on_another_stream(model, seed):
    if not model.conv.weight.is_cuda:
        pytest.skip("a model on the CPU has no streams")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if seed % 2 else torch.cuda.stream(None):
        loss(model, seed).backward()
    torch.cuda.current_stream().wait_stream(stream)


def scaled(model, seed):
    value = loss(model, seed)
    torch.amp.GradScaler(value.device.type, init_scale=2.0).scale(value).backward()


ORDERS = [
    summed,
    of_weights,
    *exhaustive(
        loss,
        accumulated,
        reversed_order,
        retained,
        without_backward,
        without_gradients,
        of_other_sizes,
        moved,
        with_gradients_of_inputs,
        checkpointed,
        scaled,
        under_hooks,
        of_expanded_images,
    ),
    pytest.param(on_another_stream, marks=pytest.mark.cuda),
]


class Stashing(torch.autograd.Function):
    """Keeps a tensor past the hooks for saved tensors."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.exp().roll(1, 0)
        return x * ctx.kept

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.kept


class Stash(Net):
    def forward(self, x):
        return Stashing.apply(super().forward(x))


class Strided(Net):
    """Saves a part of a tensor, and returns views of one tensor."""

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y[:, 0] * self.first.weight[:1, :1]


MAKE = {"whole": Net, "broken": lambda: Net(broken=True), **{kind.__name__: kind for kind in (Stash, Strided)}}


@on_both
@pytest.mark.parametrize("kind", ["whole", *exhaustive(*list(MAKE)[1:])])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_orders_of_calls(order, kind, replays, device):
    models = pair(device, MAKE[kind])
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) for model in models]
    for seed in range(10):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            value = order(model, seed)
            if value is not None:
                value.backward()
        assert_same(*models)
        for optimizer in optimizers:
            optimizer.step()
    assert guard(models[1])["hits"] >= 10
    assert replays or order in (checkpointed, of_expanded_images)


@on_both
def test_callers_keep_what_they_receive(replays, device):
    original, fused = pair(device)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (original, fused)]
    kept = [[], []]
    for seed in range(8):
        for found, model, optimizer in zip(kept, (original, fused), optimizers):
            outputs = model(images(model, seed))
            found += [outputs.detach(), *torch.autograd.grad(outputs.square().mean(), list(model.parameters()))]
            model.zero_grad()
            loss(model, seed).backward()
            optimizer.step()
    torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-6)
    assert len(replays) > 8


@on_both
def test_outputs_share_memory_as_without_recordings(replays, device):
    class Views(Net):
        def forward(self, x):
            y = self.norm(self.conv(x))
            return y, y[:, :2]

    for model in pair(device, Views):
        compiled = torch.compile(model, backend="kfconvert")
        for seed in range(6):
            with torch.no_grad():
                whole, part = compiled(images(model, seed))
            whole.zero_()
            assert not part.any()


@on_both
def test_graphs_without_operators(replays, device):
    """TorchInductor does not compile the backward of a sum."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3, 8, 8))

        def forward(self, x):
            return x + self.weight

    models = pair(device, Sum)
    for seed in range(6):
        for model in models:
            loss(model, seed).backward()
        assert_same(*models)


@cuda_only
def test_dropout_differs_in_each_replay(replays, device):
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4096))

        def forward(self, x):
            return F.dropout(x * self.weight, 0.3)

    _, fused = pair(device, Dropped)
    masks, x = [], torch.ones(4096, device=device)
    for _ in range(8):
        fused.zero_grad()
        outputs = fused(x)
        outputs.sum().backward()
        torch.testing.assert_close(fused.weight.grad, outputs.detach())
        masks.append(outputs != 0)
        assert abs(masks[-1].double().mean() - 0.7) < 4 * (0.3 * 0.7 / 4096) ** 0.5
    assert len(replays) >= 8
    assert all(not torch.equal(first, second) for first, second in zip(masks, masks[1:]))


@cuda_only
def test_a_seed_repeats_replays(replays, device):
    _, fused = pair(device, lambda: Net(dropout=0.5))
    for seed in range(5):
        loss(fused, seed).backward()
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append([fused(images(fused, 1)) for _ in range(3)][-1])
        found[-1].sum().backward()
    torch.testing.assert_close(*found, rtol=0, atol=0)


@cuda_only
def test_steps_without_recordings(replays, device, monkeypatch):
    models = [pair(device, cuda_graphs=False)[1]]
    monkeypatch.setattr(recorded, "_LAUNCH_SHARE", 1e9)
    models.append(pair(device)[1])
    for model in models:
        for seed in range(6):
            loss(model, seed).backward()
    assert not replays


@cuda_only
def test_memory_is_released(replays, device):
    def memory():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def train():
        _, fused = pair(device, lambda: nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512)))
        for _ in range(6):
            fused(torch.ones(4096, 512, device=device)).sum().backward()

    train()
    replays.clear()
    torch._dynamo.reset()
    before = memory()
    for _ in range(3):
        train()
        assert replays
        replays.clear()
        torch._dynamo.reset()
        assert memory() <= before + 2**22


@cuda_only
def test_a_capture_of_the_whole_step(replays, device):
    original, fused = pair(device)
    x = images(original, 0)
    for model in (original, fused):
        for seed in range(5):
            loss(model, seed).backward()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fused.zero_grad(set_to_none=True)
            fused(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    fused.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused(x).square().mean().backward()
    x.copy_(images(original, 9))
    graph.replay()
    original.zero_grad(set_to_none=True)
    loss(original, 9).backward()
    for own, other in zip(original.parameters(), fused.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)
