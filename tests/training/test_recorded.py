"""Recorded training steps give the losses, gradients and parameters of the original, in whatever order calls come."""

import copy
import gc

import pytest
import torch
from support.small_models import guard
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kfconvert.conversion import leave_as_it_is
from kfconvert.training import recorded

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    """The recordings that calls replayed. All graphs are recorded, even if their launches take little time."""
    found, replay = [], recorded._Recording.replay

    def counted(self, *args):
        found.append(self)
        return replay(self, *args)

    torch._dynamo.reset()
    monkeypatch.setattr(recorded, "_LAUNCH_SHARE", 0.0)
    monkeypatch.setattr(recorded._Recording, "replay", counted)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return found


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


def images(seed, batch=4):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).cuda()


def pair(make=Net, **config):
    """A model, and a copy that trains compiled."""
    torch.manual_seed(0)
    original = make().cuda()
    fused = copy.deepcopy(original)
    leave_as_it_is(fused, {"config": {"training": True, **config}})
    return original.train(), fused.train()


def loss(model, seed, batch=4):
    return model(images(seed, batch)).square().mean()


def assert_same(original, fused):
    for own, other in zip(original.parameters(), fused.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(original.state_dict(), fused.state_dict(), rtol=1e-4, atol=1e-6)


def accumulated(model, seed):
    for call in range(3):
        loss(model, 3 * seed + call).backward()


def summed(model, seed):
    (loss(model, seed) + model(images(seed + 50)).abs().mean()).backward()


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
        model(images(seed + 50))
    loss(model, seed).backward()


def of_other_sizes(model, seed):
    loss(model, seed, 6 if seed in (6, 8) else 4).backward()


def moved(model, seed):
    if seed in (4, 7):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    loss(model, seed).backward()


def with_gradients_of_inputs(model, seed):
    x = images(seed).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), [x], retain_graph=True)
    model(x + grad).square().mean().backward()


def checkpointed(model, seed):
    checkpoint(model, images(seed), use_reentrant=False).square().mean().backward()


def on_another_stream(model, seed):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if seed % 2 else torch.cuda.stream(None):
        loss(model, seed).backward()
    torch.cuda.current_stream().wait_stream(stream)


def scaled(model, seed):
    with torch.autocast("cuda", torch.float32, enabled=False):
        torch.amp.GradScaler("cuda", init_scale=64.0).scale(loss(model, seed)).backward()


ORDERS = [
    loss,
    accumulated,
    summed,
    reversed_order,
    retained,
    without_backward,
    without_gradients,
    of_other_sizes,
    moved,
    with_gradients_of_inputs,
    checkpointed,
    on_another_stream,
    scaled,
]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_orders_of_calls(order, broken, replays):
    models = pair(lambda: Net(broken=broken))
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
    assert replays and guard(models[1])["hits"] >= 10


def test_callers_keep_what_they_receive(replays):
    original, fused = pair()
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (original, fused)]
    kept = [[], []]
    for seed in range(8):
        for found, model, optimizer in zip(kept, (original, fused), optimizers):
            outputs = model(images(seed))
            found += [outputs.detach(), *torch.autograd.grad(outputs.square().mean(), list(model.parameters()))]
            model.zero_grad()
            loss(model, seed).backward()
            optimizer.step()
    torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-6)
    assert len(replays) > 8


def test_dropout_differs_in_each_replay(replays):
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4096))

        def forward(self, x):
            return F.dropout(x * self.weight, 0.3)

    _, fused = pair(Dropped)
    masks, x = [], torch.ones(4096, device="cuda")
    for _ in range(6):
        fused.zero_grad()
        outputs = fused(x)
        outputs.sum().backward()
        torch.testing.assert_close(fused.weight.grad, outputs.detach())
        masks.append(outputs != 0)
        assert abs(masks[-1].double().mean() - 0.7) < 4 * (0.3 * 0.7 / 4096) ** 0.5
    assert len(replays) >= 6
    assert all(not torch.equal(first, second) for first, second in zip(masks, masks[1:]))


def test_a_seed_repeats_replays(replays):
    _, fused = pair(lambda: Net(dropout=0.5))
    for seed in range(5):
        loss(fused, seed).backward()
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append([fused(images(1)) for _ in range(3)][-1])
        found[-1].sum().backward()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_steps_without_recordings(replays, monkeypatch):
    models = [pair(cuda_graphs=False)[1]]
    monkeypatch.setattr(recorded, "_LAUNCH_SHARE", 1e9)
    models.append(pair()[1])
    for model in models:
        for seed in range(6):
            loss(model, seed).backward()
    assert not replays


def test_memory_is_released(replays):
    def memory():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def train():
        _, fused = pair(lambda: nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512)))
        for _ in range(6):
            fused(torch.ones(4096, 512, device="cuda")).sum().backward()

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


def test_a_capture_of_the_whole_step(replays):
    original, fused = pair()
    x = images(0)
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
    x.copy_(images(9))
    graph.replay()
    original.zero_grad(set_to_none=True)
    loss(original, 9).backward()
    for own, other in zip(original.parameters(), fused.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)
