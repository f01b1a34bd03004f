"""Converted models under DistributedDataParallel and FSDP2: two processes on CPU, joined by gloo."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.small_models import assert_valid, bert, cnn, converted, guard, inputs_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

RANKS = 2

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


def test_two_processes(tmp_path):
    mp.spawn(_convert_and_fork, (str(tmp_path / "store"),))


def _convert_and_fork(_: int, store: str) -> None:
    """In a new process with one thread, which can be forked; imports and conversions take long, so they come before."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # misses of the guard, which are looked at below
    for make in (cnn, bert):
        converted(make)
    mp.start_processes(_worker, (store,), nprocs=RANKS, start_method="fork")


def _worker(rank: int, store: str) -> None:
    # PyTorch makes its thread pool anew at the first use after a fork, which is not safe in two threads at once.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    try:
        check_ddp(cnn(), converted(cnn), rank)
        check_ddp_in_eval_mode(cnn(), converted(cnn), rank)
        check_fsdp(cnn(), converted(cnn), rank)
        check_fsdp_of_every_layer(bert(), converted(bert), rank)
    finally:
        dist.destroy_process_group()


def logits(model: nn.Module, inputs: dict) -> torch.Tensor:
    outputs = model(**inputs)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def train_step(model: nn.Module, inputs: dict, optimizer: torch.optim.Optimizer) -> None:
    logits(model, inputs).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check_ddp(original: nn.Module, fused: nn.Module, rank: int) -> None:
    inputs = inputs_of(original, seed=rank)
    for model in (original.train(), fused.train()):
        wrapped = DistributedDataParallel(model)
        train_step(wrapped, inputs, sgd(wrapped))
    for (name, own), (_, other) in zip(original.named_parameters(), fused.named_parameters()):
        torch.testing.assert_close(other, own, rtol=0, atol=0, msg=name)
        assert_same_everywhere(other)
    assert_valid(original.eval(), fused.eval())
    assert guard(fused)["hits"]


def check_ddp_in_eval_mode(original: nn.Module, fused: nn.Module, rank: int) -> None:
    """Its hooks sit on the parameters, which the fused forward hands to autograd."""
    for model in (original, fused):
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        train_step(wrapped.eval(), inputs_of(model, seed=rank), sgd(wrapped))
    for parameter in fused.parameters():
        assert_same_everywhere(parameter)
    assert_valid(original, fused)
    assert guard(fused)["hits"] and not guard(fused)["misses"]


def assert_same_everywhere(parameter: torch.Tensor) -> None:
    everywhere = [torch.empty_like(parameter) for _ in range(RANKS)]
    dist.all_gather(everywhere, parameter.detach())
    assert torch.equal(*everywhere)


def check_fsdp(original: nn.Module, fused: nn.Module, rank: int) -> None:
    sharded = copy.deepcopy(original)
    for model in (sharded, fused):
        shard(model)
    optimizers = [sgd(model) for model in (sharded, fused)]
    check_outputs(original, fused, rank)
    for model, optimizer in zip((sharded, fused), optimizers):
        train_step(model.train(), inputs_of(original, seed=rank), optimizer)
    weights = [{name: p.full_tensor() for name, p in model.named_parameters()} for model in (sharded, fused)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    original.load_state_dict({**weights[0], **dict(fused.named_buffers())}, strict=False)
    check_outputs(original, fused, rank)
    # Another class is noticed at once, other parameters once the hooks are looked at.
    reasons = {reason for reason in guard(fused)["misses"] if "in train mode" not in reason}
    assert reasons and not guard(fused)["hits"], reasons
    assert all("after the conversion" in reason for reason in reasons), reasons


def check_fsdp_of_every_layer(original: nn.Module, fused: nn.Module, rank: int) -> None:
    for layer in fused.bert.encoder.layer:
        shard(layer)
    shard(fused)
    for _ in range(3):
        check_outputs(original, fused, rank)
        with torch.no_grad():
            for parameter in (*original.parameters(), *fused.parameters()):
                parameter.mul_(1.3)


def shard(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), reshard_after_forward=True)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_outputs(original: nn.Module, fused: nn.Module, rank: int) -> None:
    inputs = inputs_of(original, seed=10 + rank)
    with torch.no_grad():
        outputs = [logits(model.eval(), inputs) for model in (original, fused)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
