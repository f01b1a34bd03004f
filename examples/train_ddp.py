"""Training in several processes: a converted model with DistributedDataParallel or FSDP2, one process a GPU or a core.

    torchrun --nproc-per-node 2 examples/train_ddp.py [--small] [--device cuda] [--fsdp] [--training]

You learn that a converted model is trained as the original is: in train mode its original forward runs, the gradients
are those of the original on every rank, and after eval() its program takes the new weights. Each rank converts for
itself; nothing that is measured there has to be the same on the others. With --training, its original forward and the
backward pass run compiled. With --fsdp, each rank has a shard of each weight, and after eval() the original forward
runs, as a program reads whole weights.
"""

import copy
import os

import torch
import torch.distributed as dist
from shared import converted, options_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WIDTH, CLASSES = 32, 10


def network(layers):
    """(batch, WIDTH) -> (batch, CLASSES)"""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(layers)]
    return nn.Sequential(*(nn.Sequential(block, nn.LayerNorm(WIDTH)) for block in blocks), nn.Linear(WIDTH, CLASSES))


def batches(rank, count, device):
    """(inputs, classes) that each rank has for itself; the classes follow from the inputs."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        inputs = torch.randn(64, WIDTH, generator=generator)
        yield inputs.to(device), inputs[:, :CLASSES].argmax(1).to(device)


def distributed(model, fsdp):
    if not fsdp:
        return DistributedDataParallel(model)
    device = next(model.parameters()).device.type
    return fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))


def whole(tensor):
    """A copy of all shards of ``tensor``."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(model, given, fsdp):
    """The losses of all steps, and the gradients of each step."""
    wrapped, losses, gradients = distributed(model.train(), fsdp), [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, classes in given:
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(inputs), classes)
        loss.backward()
        losses.append(loss.item())
        gradients.append([whole(parameter.grad) for parameter in model.parameters()])
        optimizer.step()
    return losses, gradients


def alike_everywhere(tensors):
    """Whether all ranks have the same numbers in ``tensors``."""
    flat = torch.cat([whole(tensor).flatten() for tensor in tensors])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return all(torch.equal(each, flat) for each in found)


def main(argv=None):
    parser = options_of(__doc__)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 in place of DistributedDataParallel")
    parser.add_argument("--training", action="store_true", help="convert with training=True")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        raise SystemExit("torchrun starts the processes: torchrun --nproc-per-node 2 examples/train_ddp.py")
    kind = torch.device(options.device).type
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        rank = dist.get_rank()
        torch.manual_seed(0)
        original = network(2 if options.small else 6).to(device).eval()
        inputs, _ = next(batches(rank, 1, device))
        given = copy.deepcopy(original)
        fused = converted(f"rank {rank}", given, inputs, options.small, training=options.training)

        steps = 10 if options.small else 200
        losses, own = train(original, batches(rank, steps, device), options.fsdp)
        _, found = train(fused, batches(rank, steps, device), options.fsdp)
        calls = fused.kfconvert_info()["guard"]["hits"]
        pairs = [pair for one, other in zip(own, found) for pair in zip(one, other)]
        apart = max((a - b).abs().max().item() for a, b in pairs)
        equal = apart <= (1e-5 if options.training else 0)
        alike = alike_everywhere([gradient for step in found for gradient in step] + list(fused.parameters()))
        with torch.no_grad():
            difference = (fused.eval()(inputs) - original.eval()(inputs)).abs().max().item()
        programs = fused.kfconvert_info()["guard"]["hits"] - calls
        print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, gradients equal: {equal}, on all ranks: {alike}")
        print(f"rank {rank}: {calls} of {steps} steps compiled, gradients are off by {apart:.1e}")
        print(f"rank {rank}: after eval(), it is off by {difference:.1e}, calls of its program: {programs}", flush=True)
        expected = (steps if options.training else 0, 0 if options.fsdp else 1)
        accurate = equal and alike and difference < 1e-4
        return 0 if accurate and (calls, programs) == expected and losses[-1] < losses[0] else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
