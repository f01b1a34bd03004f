"""Tokens per second of ``generate()``: the original and the converted model, which take turns.

    python scripts/bench_generate.py gpt2 llama t5 --batch 1 4 --prompt 64 --new 64

The models are small, of random weights, on the CPU; no registry is asked. Each line has the medians of all rounds.
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


MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], default=[])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, nargs="+", default=[64])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name in options.models or MODELS:
        torch.manual_seed(0)
        model = MODELS[name](options.width, options.layers).eval()
        start = time.perf_counter()
        fused = ModelConverter().convert_model(model, input_shape=(options.batch[0], options.prompt[0]))
        print(f"{name}: converted in {time.perf_counter() - start:.1f} s")
        for batch in options.batch:
            for length in options.prompt:
                ids = torch.randint(3, 8000, (batch, length))
                asked = {"max_new_tokens": options.new, "min_new_tokens": options.new, "do_sample": False}
                both: dict[str, Any] = {"original": model, "converted": fused}
                calls = {key: partial(each.generate, ids, **asked) for key, each in both.items()}
                times = compare_timings(calls, budget_s=0.0, min_rounds=options.rounds)
                tokens = 1e3 * batch * options.new
                rates = ", ".join(f"{key} {tokens / each.median_ms:.0f}" for key, each in times.items())
                faster = times.speedup("converted").summary()
                print(f"  batch {batch}, prompt {length}, {options.new} new: {rates} tokens/s, {faster}")
        print(f"  {fused.kfconvert_info()['guard']}")


if __name__ == "__main__":
    main()
