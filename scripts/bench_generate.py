"""Tokens per second of ``generate()``: the original, transformers' static cache with torch.compile, and the converted
model, which take turns.

    PYTHONPATH=. python scripts/bench_generate.py gpt2 llama t5 --batch 1 4 --prompt 64 --new 64
    PYTHONPATH=. python scripts/bench_generate.py llama-1.1b --device cuda --dtype float16 --batch 1 16 --compiled

The models have random weights; no registry is asked. Each line has the medians of all rounds, and on CUDA the memory
that each took at most beside the weights.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from kfconvert import ModelConverter
from kfconvert.profiling import compare_timings

transformers.logging.set_verbosity_error()


def gpt2(width: int, layers: int) -> nn.Module:
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64, vocab_size=8000)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def llama(width: int, layers: int) -> nn.Module:
    heads = width // 64
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1), vocab_size=8000, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5(width: int, layers: int) -> nn.Module:
    config = transformers.T5Config(
        d_model=width, d_kv=64, d_ff=4 * width, num_layers=layers, num_heads=width // 64, vocab_size=8000,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def gpt2_124m(width: int, layers: int) -> nn.Module:
    config = transformers.GPT2Config()
    config.pad_token_id = config.eos_token_id
    return transformers.GPT2LMHeadModel(config)


def llama_1b(width: int, layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
        vocab_size=32000, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5, "gpt2-124m": gpt2_124m, "llama-1.1b": llama_1b}
SMALL = ("gpt2", "llama", "t5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, nargs="+", default=[64])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--compiled", action="store_true", help="transformers' static cache with torch.compile, too")
    parser.add_argument("--effort", default="full", choices=["fast", "full"])
    options = parser.parse_args()
    for name in options.models or SMALL:
        torch.manual_seed(0)
        with torch.device(options.device):
            model = MODELS[name](options.width, options.layers).eval().to(getattr(torch, options.dtype))
        start = time.perf_counter()
        fused = ModelConverter(effort=options.effort).convert_model(
            model, input_shape=(options.batch[0], options.prompt[0])
        )
        print(f"{name}: converted in {time.perf_counter() - start:.1f} s")
        for batch in options.batch:
            for length in options.prompt:
                bench(model, fused, batch, length, options)
        print(f"  {fused.kfconvert_info()['guard']} {fused.kfconvert_info()['generate']}")


def bench(model: Any, fused: Any, batch: int, length: int, options: argparse.Namespace) -> None:
    ids = torch.randint(3, 8000, (batch, length), device=options.device)
    asked = {"max_new_tokens": options.new, "min_new_tokens": options.new, "do_sample": False}
    calls = {"original": partial(model.generate, ids, **asked)}
    if options.compiled:
        calls["static and compiled"] = partial(model.generate, ids, **asked, cache_implementation="static")
    calls["converted"] = partial(fused.generate, ids, **asked)
    memory = {key: memory_of(call, options.device) for key, call in calls.items()}
    times = compare_timings(calls, torch.device(options.device), budget_s=0.0, min_rounds=options.rounds)
    tokens = 1e3 * batch * options.new
    rates = ", ".join(f"{key} {tokens / each.median_ms:.0f}{memory[key]}" for key, each in times.items())
    faster = times.speedup("converted").summary()
    print(f"  batch {batch}, prompt {length}, {options.new} new: {rates} tokens/s, {faster}", flush=True)


def memory_of(call: Any, device: str) -> str:
    """The most that ``call``, which is prepared before, allocates on the device."""
    call()
    if not device.startswith("cuda"):
        return ""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return f" ({(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB)"


if __name__ == "__main__":
    main()
