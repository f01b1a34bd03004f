"""Compiled training under DistributedDataParallel and FSDP2: two processes on the CPU, joined by gloo."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.small_models import bert, guard, inputs_of
from torch._inductor import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kfconvert.conversion import leave_as_it_is

RANKS = 2

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]


def test_two_processes(tmp_path):
    mp.spawn(_worker, (str(tmp_path / "store"),), nprocs=RANKS)


def _worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    graphs = []

    def run_uncompiled(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    compile_fx.compile_fx = run_uncompiled
    try:
        for wrapped in (one_bucket, small_buckets, several_buckets, sharded, sharded_by_layer, checkpointed):
            graphs.clear()
            check(wrapped, rank)
            assert (len(graphs) > 1) == (wrapped not in (one_bucket, small_buckets, sharded)), wrapped.__name__
    finally:
        dist.destroy_process_group()


def one_bucket(model):
    return DistributedDataParallel(model)


def small_buckets(model):
    """Dynamo does not split graphs for buckets below its minimum."""
    return DistributedDataParallel(model, bucket_cap_mb=0.01)


def several_buckets(model):
    """Dynamo splits the graph, so that ranks exchange gradients during backward."""
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1000
    return small_buckets(model)


def sharded(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))


def sharded_by_layer(model):
    for layer in model.bert.encoder.layer:
        sharded(layer)
    return sharded(model)


def checkpointed(model):
    model.gradient_checkpointing_enable()
    return sharded_by_layer(model)


def check(wrapped, rank: int) -> None:
    """Three steps, of which the second only adds to the gradients, give the parameters of the original."""
    torch._dynamo.reset()
    original = bert().train()
    fused, parameters = copy.deepcopy(original), []
    leave_as_it_is(fused, {"config": {"training": True}})
    for model in (original, fused):
        called = wrapped(model)
        optimizer = torch.optim.SGD(called.parameters(), 0.1)
        for step in range(3):
            called(**inputs_of(model, seed=10 * step + rank)).logits.square().mean().backward()
            if step != 1:
                torch.nn.utils.clip_grad_norm_(called.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        parameters.append([p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()])
    torch.testing.assert_close(*parameters, rtol=0, atol=1e-6, msg=lambda text: f"{wrapped.__name__}: {text}")
    assert guard(fused) == {"hits": 3, "misses": {}}, wrapped.__name__
