"""Compares training with ``training=True`` with the original's: errors of gradients, and curves of losses.

    PYTHONPATH=. python scripts/training_curves.py
    PYTHONPATH=. python scripts/training_curves.py --models gpt2 --steps 100 --seeds 2 --device cpu

The models are small and random. GPT-2 and BERT read the words of the repository's pages, a ResNet of four blocks sees
images whose labels a fixed random network gives. "gradients" is the error of all gradients together in bfloat16
autocast, relative to float64: converted over original, the root mean square of several batches. "loss" is the mean of
the last tenth of the steps in float32, with the standard error of its mean over the seeds. All models of a seed see
the same batches.
"""

import argparse
import copy
import functools
import itertools
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
import transformers
from torch import Tensor, nn

import kfconvert

ROOT = Path(__file__).resolve().parent.parent
WORDS, LENGTH, BATCH = 512, 32, 4
Batches = Iterator[dict[str, Tensor]]


@functools.cache
def text() -> Tensor:
    """The words of the pages as numbers; those that are not among the most frequent get the last number."""
    found = " ".join(page.read_text() for page in sorted(ROOT.glob("docs/**/*.md"))).split()
    numbers = {word: number for number, (word, _) in enumerate(Counter(found).most_common(WORDS - 1))}
    return torch.tensor([numbers.get(word, WORDS - 1) for word in found])


def lines(seed: int, hidden: bool) -> Batches:
    """Batches of lines of the text; with ``hidden`` words, for a masked language model."""
    words, random = text(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(words) - LENGTH, (BATCH,), generator=random)
        ids = torch.stack([words[start : start + LENGTH] for start in starts.tolist()])
        chosen = torch.rand(ids.shape, generator=random) < 0.15
        shown = ids.masked_fill(chosen, WORDS - 1) if hidden else ids
        yield {"input_ids": shown, "labels": ids.masked_fill(~chosen, -100) if hidden else ids}


def images(seed: int) -> Batches:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Conv2d(3, 10, 5, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    random = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, 3, 32, 32, generator=random)
        with torch.no_grad():
            labels = teacher(x).argmax(-1)
        yield {"images": x, "labels": labels}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(images), labels)}


def gpt2() -> nn.Module:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": LENGTH}
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=WORDS, **sizes, **dropouts))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batches]]] = {
    "gpt2": (gpt2, lambda seed: lines(seed, False)),
    "bert": (bert, lambda seed: lines(seed, True)),
    "resnet": (Classifier, images),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print("| model | gradients | loss at first | loss, original | loss, converted | within 2 errors | s |")
    print("|---|---:|---:|---:|---:|---|---:|")
    for name in options.models:
        begin = time.perf_counter()
        error = gradient_ratio(name, device)
        found = [curves(name, seed, options.steps, device) for seed in range(options.seeds)]
        last = max(1, options.steps // 10)
        own, ours = ([statistics.fmean(each[index][-last:]) for each in found] for index in (0, 1))
        error_of_mean = statistics.stdev(own) / len(own) ** 0.5 if len(own) > 1 else float("nan")
        apart = abs(statistics.fmean(own) - statistics.fmean(ours))
        first = statistics.fmean(each[0][0] for each in found)
        losses = f"{statistics.fmean(own):.4f} +- {error_of_mean:.4f} | {statistics.fmean(ours):.4f}"
        verdict = "yes" if apart <= 2 * error_of_mean else "no"
        seconds = time.perf_counter() - begin
        print(f"| {name} | {error:.3f} | {first:.3f} | {losses} | {verdict} | {seconds:.0f} |", flush=True)
    return 0


def converted(model: nn.Module, batch: dict[str, Tensor]) -> nn.Module:
    converter = kfconvert.ModelConverter(effort="fast", new_tokens=0, training=True)
    return converter.convert_model(copy.deepcopy(model).eval(), example_inputs=batch, inplace=False).train()


def moved(batches: Batches, device: torch.device) -> Batches:
    return ({key: value.to(device) for key, value in batch.items()} for batch in batches)


def curves(name: str, seed: int, steps: int, device: torch.device) -> tuple[list[float], list[float]]:
    """The losses of all steps: of the original, and of the converted model."""
    torch.manual_seed(seed)
    make, batches = MODELS[name]
    model = make().train().to(device)
    both = model, converted(model, next(moved(batches(seed), device)))
    found: list[list[float]] = []
    for each in both:
        optimizer, losses = torch.optim.AdamW(each.parameters(), lr=1e-3), list[float]()
        for batch in itertools.islice(moved(batches(seed), device), steps):
            optimizer.zero_grad()
            loss = each(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    counts = both[1].kfconvert_info()["guard"]
    if counts["misses"]:
        raise RuntimeError(f"{name}: calls ran the original: {counts}")
    return found[0], found[1]


def gradient_ratio(name: str, device: torch.device, count: int = 8) -> float:
    """The error of the gradients in bfloat16 autocast, relative to float64: converted over original."""
    torch.manual_seed(0)
    make, batches = MODELS[name]
    model = make().train().to(device)
    exact, fused = copy.deepcopy(model).double(), converted(model, next(moved(batches(0), device)))
    errors = [0.0, 0.0]
    for batch in itertools.islice(moved(batches(1), device), count):
        wide = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
        truth = gradients(exact, wide, False)
        for index, each in enumerate((model, fused)):
            errors[index] += (gradients(each, batch, True) - truth).square().sum().item()
    return (errors[1] / errors[0]) ** 0.5


def gradients(model: nn.Module, batch: dict[str, Any], lower: bool) -> Tensor:
    model.zero_grad()
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=lower):
        loss = model(**batch)["loss"]
    loss.backward()
    return torch.cat([each.grad.double().flatten() for each in model.parameters() if each.grad is not None])


if __name__ == "__main__":
    sys.exit(main())
