"""Calls of a converted model from many threads, with many shapes, on several streams, while its weights change.

Every output is compared with that of a copy without CUDA graphs, bit by bit, and the memory is shown as it goes on:

    python scripts/soak_cuda_graphs.py --calls 10000
    compute-sanitizer --tool memcheck python scripts/soak_cuda_graphs.py --calls 200 --phases 4 --shapes 4

The exit status is 1 where an output differs or the memory still grows in the last third.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from transformers import BertConfig, BertModel

from kfconvert import ModelConverter


def encoder() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=256,
    )  # fmt: skip
    return BertModel(config).cuda().half().eval()


class Soak:
    """``recorded`` and ``launched`` are the same model, with and without CUDA graphs."""

    def __init__(self, shapes: int, streams: int, recordings: int):
        model = encoder()
        inputs = {"input_ids": torch.randint(0, 512, (2, 16), device="cuda")}

        def converted(**options: object) -> nn.Module:
            converter = ModelConverter(select="all", validate_accuracy=False, **options)
            return converter.convert_model(model, example_inputs=inputs)

        self.recorded = converted(cuda_graphs=True, max_recordings=recordings)
        self.launched = converted(cuda_graphs=False)
        self.original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.shapes = [(1 + index % 4, 2 + index) for index in range(shapes)]
        self.streams = [torch.cuda.Stream() for _ in range(streams)]
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def write(self, phase: int) -> str:
        """Change the weights of both models in the same way."""
        kind = ("steps of an optimizer", "load_state_dict", "in place", "replaced")[phase % 4]
        for model in (self.recorded, self.launched):
            torch.manual_seed(phase)
            if kind == "load_state_dict":
                model.load_state_dict(self.original)
            elif kind == "steps of an optimizer":
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                torch.optim.SGD(model.parameters(), lr=1e-3).step()
                model.zero_grad()
            elif kind == "in place":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
            else:
                dense = model.encoder.layer[0].output.dense
                dense.weight = nn.Parameter(torch.randn_like(dense.weight) / 16)
        torch.cuda.synchronize()
        return kind

    def call(self, seed: int) -> None:
        draw = random.Random(seed)
        shape, stream = draw.choice(self.shapes), draw.choice(self.streams)
        with torch.cuda.stream(stream), torch.no_grad():
            ids = torch.randint(0, 512, shape, device="cuda")
            mask = torch.ones_like(ids) if draw.random() < 0.5 else None
            arguments = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
            actual, expected = self.recorded(**arguments), self.launched(**arguments)
            same = all(torch.equal(one, other) for one, other in zip(actual.to_tuple(), expected.to_tuple()))
        with self._lock:
            self.counts["same" if same else f"different at {shape}"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--shapes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--phases", type=int, default=25, help="the weights are changed before each")
    parser.add_argument("--recordings", type=int, default=16)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    soak = Soak(options.shapes, options.streams, options.recordings)
    reserved = []
    print("| phase | weights | replayed | launched | recordings | their MiB | reserved MiB | differing |")
    print("|---|---|---|---|---|---|---|---|")
    with ThreadPoolExecutor(options.threads) as pool:
        for phase in range(options.phases):
            kind = soak.write(phase)
            calls = options.calls // options.phases
            list(pool.map(soak.call, range(phase * calls, (phase + 1) * calls)))
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved() >> 20)
            graphs = soak.recorded.kfconvert_info()["cuda_graphs"]
            differing = sum(soak.counts.values()) - soak.counts["same"]
            print(
                f"| {phase} | {kind} | {graphs['replayed']} | {graphs['launched']} | {graphs['recordings']} "
                f"| {graphs['bytes'] / 2**20:.1f} | {reserved[-1]} | {differing} |",
                flush=True,
            )
    info = soak.recorded.kfconvert_info()
    print(f"misses: {info['guard']['misses']}; refused: {info['cuda_graphs']['refused']}")
    third = reserved[2 * options.phases // 3 :]
    growing = third[-1] > third[0]
    print(
        f"{soak.counts['same']} outputs equal, {differing} not; memory {'grows' if growing else 'has stopped growing'}"
    )
    for reason, count in soak.counts.most_common(5):
        print(f"  {reason}: {count}")
    return 1 if differing or growing else 0


if __name__ == "__main__":
    sys.exit(main())
