"""Generations of a converted model from several threads, with lengths, batches and arguments at random.

The tokens of every one are compared with those of the original, in float64, and the memory is shown as it goes on:

    PYTHONPATH=. python scripts/soak_generate.py --calls 500 --threads 4 --device cuda

The exit status is 1 where tokens differ, nothing was served by recorded steps, or the memory still grows in the second
half.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers

from kfconvert import ModelConverter

transformers.logging.set_verbosity_error()
SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=64, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=48, n_head=4, vocab_size=96, n_positions=512, pad_token_id=0, eos_token_id=2
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
}
# More than this is growth, not how PyTorch rounds what it takes.
SLACK_MIB = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    return int(any([soak(name, options) for name in options.models or MODELS]))


def soak(name: str, options: argparse.Namespace) -> bool:
    """Whether something was wrong."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval().to(options.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = ModelConverter(select="all", new_tokens=0).convert_model(model, input_shape=(2, 6))
    wrong, memory = 0, []
    tenths = [range(i * options.calls // 10, (i + 1) * options.calls // 10) for i in range(10)]
    with ThreadPoolExecutor(options.threads) as pool:
        for part in tenths:
            wrong += sum(pool.map(lambda seed: not is_same(model, fused, seed), part))
            memory.append(held_mib(options.device))
    info = fused.kfconvert_info()["generate"]
    growth = max(memory[5:]) - memory[4]
    print(f"{name}: {options.calls} calls, {wrong} differ; MiB {', '.join(f'{each:.0f}' for each in memory)}; {info}")
    return bool(wrong or not info["served"] or growth > SLACK_MIB)


def is_same(model: Any, fused: Any, seed: int) -> bool:
    arguments = arguments_of(seed, model.device)
    tokens = [each.generate(**arguments) for each in (model, fused)]
    return torch.equal(*tokens)


def arguments_of(seed: int, device: torch.device) -> dict[str, Any]:
    """A call of ``generate`` that draws no random numbers, as the threads share the generator."""
    chosen = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, length = chosen.choice([1, 1, 2, 3, 5]), chosen.randint(1, 90)
    ids = torch.randint(3, 96, (batch, length), generator=generator)
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": chosen.choice([1, 2, 5, 30, 90])}
    if chosen.random() < 0.3 and length > 4:
        ids[0, : chosen.randint(1, 3)] = 0
        asked["attention_mask"] = (ids != 0).long().to(device)
    for share, name, value in (
        (0.3, "repetition_penalty", 1.3),
        (0.3, "eos_token_id", list(range(20, 50))),
        (0.2, "min_new_tokens", 4),
        (0.1, "num_beams", 2),
        (0.1, "no_repeat_ngram_size", 3),
    ):
        if chosen.random() < share:
            asked[name] = value
    return {"input_ids": ids.to(device), **asked}


def held_mib(device: str) -> float:
    if device.startswith("cuda"):
        return torch.cuda.memory_reserved() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    sys.exit(main())
