"""Training in several processes: DistributedDataParallel around a converted model, one process a GPU or a core.

    torchrun --nproc-per-node 2 examples/train_ddp.py [--small] [--device cuda]

You learn that a converted model is trained as the original is: in train mode its original forward runs, the gradients
are those of the original on every rank, and after eval() its program takes the new weights. Each rank converts for
itself; nothing that is measured there has to be the same on the others.
"""

import copy
import os

import torch
import torch.distributed as dist
from shared import converted, options_of
from torch import nn
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


def train(model, given):
    """The losses of all steps, and the gradients of each step."""
    wrapped, losses, gradients = DistributedDataParallel(model.train()), [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, classes in given:
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(inputs), classes)
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return losses, gradients


def alike_everywhere(tensors):
    """Whether all ranks have the same numbers in ``tensors``."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return all(torch.equal(each, flat) for each in found)


def main(argv=None):
    options = options_of(__doc__).parse_args(argv)
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
        fused = converted(f"rank {rank}", copy.deepcopy(original), inputs, options.small)

        steps = 10 if options.small else 200
        losses, own = train(original, batches(rank, steps, device))
        _, found = train(fused, batches(rank, steps, device))
        equal = all(torch.equal(a, b) for one, other in zip(own, found) for a, b in zip(one, other))
        alike = alike_everywhere([gradient for step in found for gradient in step] + list(fused.parameters()))
        with torch.no_grad():
            difference = (fused.eval()(inputs) - original.eval()(inputs)).abs().max().item()
        hits = fused.kfconvert_info()["guard"]["hits"]
        print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, gradients equal: {equal}, on all ranks: {alike}")
        print(f"rank {rank}: the trained program is off by {difference:.1e}, calls of it: {hits}", flush=True)
        return 0 if equal and alike and hits and difference < 1e-4 and losses[-1] < losses[0] else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
