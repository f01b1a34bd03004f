"""Large models on a GPU: seconds to convert, save and load them, memory while converting, and tokens per second.

    PYTHONPATH=. python scripts/bench_large_models.py qwen3-0.6b llama-8b
    PYTHONPATH=. python scripts/bench_large_models.py llama-8b --efforts fast full --fraction 0.5

The models have random weights in bfloat16. Each conversion runs in a process of its own, with an empty cache of times,
and converts in place. "again" is a second conversion of an equal model in another process. "peak" is the memory while
converting, relative to the weights. "bound" is the speed of the memory over the bytes of the weights that a token
reads: no step at batch 1 can be faster. "step ms" is the time for each token from 33 to 97 tokens, and "of bound" the
speed of these steps over the bound.
"""

import argparse
import datetime
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STAGES = ("trace", "match", "select", "replace", "validate", "compare", "compile", "memory", "time", "rest")
TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help=", ".join(MODELS))
    parser.add_argument("--efforts", nargs="+", default=["fast"], choices=["fast", "full"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--fraction", type=float, help="share of the device's memory that the process may use")
    parser.add_argument("--stage", choices=["first", "again"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        print(json.dumps(measured(options.models[0], options)))
        return
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {datetime.date.today()}"
    print(f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}, {versions}\n")
    numbers = "convert s", *STAGES, "again s", "peak", "save s", "load s", "read s"
    rates = "original tokens/s", "converted", "bound", "step ms", "of bound"
    print(
        f"| model | effort | GiB | {' | '.join((*numbers, *rates))} |\n|---|---|{'---:|' * (len(numbers + rates) + 1)}"
    )
    for name in options.models:
        for effort in options.efforts:
            with tempfile.TemporaryDirectory() as folder:
                environment = os.environ | {"KFCONVERT_CACHE": folder}
                command = [sys.executable, __file__, name, "--efforts", effort, "--device", options.device]
                command += ["--fraction", str(options.fraction)] if options.fraction else []
                first, again = (run([*command, "--stage", stage], environment) for stage in ("first", "again"))
            print(row(name, effort, first, again), flush=True)


def run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def row(name: str, effort: str, first: dict[str, Any], again: dict[str, Any]) -> str:
    if not first:
        return f"| {name} | {effort} | failed |"
    stages = [f"{first['stages'].get(stage, 0.0):.1f}" for stage in STAGES]
    rates = first["rates"]
    values = [
        f"{first['gib']:.1f}", f"{first['seconds']:.1f}", *stages, f"{again.get('seconds', float('nan')):.1f}",
        f"{first['peak']:.2f}", *(f"{first[each]:.1f}" for each in ("save", "load", "read")),
        *(f"{each:.0f}" for each in (*rates, first["bound"])), f"{1e3 * first['step']:.3f}",
        f"{1 / first['step'] / first['bound']:.2f}",
    ]  # fmt: skip
    return f"| {name} | {effort} | {' | '.join(values)} |"


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Converts the model ``name``, and measures what the row needs."""
    import torch
    import transformers

    import kfconvert

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = torch.device(options.device)
    if options.fraction:
        torch.cuda.set_per_process_memory_fraction(options.fraction)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # as from_pretrained does
    with torch.device(device):
        model, example = MODELS[name]()
    model = model.eval()
    torch.set_default_dtype(torch.float32)
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    is_first = options.stage == "first"
    original = TOKENS / seconds_of(model, example) if is_first else 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()
    converter = kfconvert.ModelConverter(effort=options.efforts[0])
    begin = time.perf_counter()
    with most_memory(device) as peak:
        converter.convert_model(model, example_inputs=example, inplace=True)
    seconds = time.perf_counter() - begin
    if not is_first:
        return {"seconds": seconds}
    stages = converter.conversion_stats["seconds"]
    found = {
        "gib": size / 2**30, "seconds": seconds, "stages": stages | {"rest": seconds - sum(stages.values())},
        "peak": max(peak) / size,
        "rates": (original, TOKENS / seconds_of(model, example)), "bound": bound(model, device),
        "step": (seconds_of(model, example, 33 + TOKENS) - seconds_of(model, example, 33)) / TOKENS,
    }  # fmt: skip
    print(converter.conversion_stats, file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        kfconvert.save(model, folder + "/artifact")
        found["save"] = time.perf_counter() - begin
        del model, converter
        gc.collect()
        return found | loaded(folder + "/artifact", device)


@contextmanager
def most_memory(device: Any) -> Iterator[list[int]]:
    """Context manager that yields a list, to which a thread appends the allocated bytes of the device every 2 ms: a
    conversion resets PyTorch's own peak."""
    import torch

    found, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            found.append(torch.cuda.memory_allocated(device))

    thread = threading.Thread(target=watch, daemon=True)
    if device.type == "cuda":
        thread.start()
    try:
        yield found
    finally:
        is_over.set()


def loaded(folder: str, device: Any) -> dict[str, float]:
    """Seconds to read the file of the weights in the artifact ``folder`` alone, and to load the artifact."""
    import torch
    from safetensors.torch import load_file

    import kfconvert

    begin = time.perf_counter()
    tensors = load_file(folder + "/model.safetensors", device=str(device))
    read = time.perf_counter() - begin
    del tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
    begin = time.perf_counter()
    kfconvert.load(folder, device=device)
    return {"read": read, "load": time.perf_counter() - begin}


def seconds_of(model: Any, example: dict[str, Any], tokens: int = TOKENS) -> float:
    """Seconds of ``generate()`` for one sequence: the fastest of three calls, after one that prepares."""
    import torch

    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    inputs = {key: value for key, value in example.items() if not key.startswith("decoder")}
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        model.generate(**inputs, **asked)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def bound(model: Any, device: Any) -> float:
    """Tokens per second at which the weights, without a table of embeddings that only a lookup reads, pass through
    memory once per token, at the measured speed of a copy."""
    import torch

    inputs = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    read = {each.data_ptr(): each.numel() * each.element_size() for each in model.parameters()}
    if head is None or head.weight is not inputs:
        read.pop(inputs.data_ptr(), None)
    if device.type != "cuda":
        return float("nan")
    x, y = (torch.empty(2**30, dtype=torch.uint8, device=device) for _ in range(2))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    y.copy_(x)
    start.record()
    for _ in range(10):
        y.copy_(x)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * 2**30 / (start.elapsed_time(end) / 1e3) / sum(read.values())


def ids(length: int = 32) -> Any:
    import torch

    return torch.randint(3, 8000, (1, length))


def decoder(kind: str, **config: Any) -> Any:
    import transformers

    kinds = f"{kind}TextConfig", f"{kind}Config"
    made = next(getattr(transformers, each) for each in kinds if hasattr(transformers, each))
    config = made(**config, pad_token_id=0)
    return getattr(transformers, f"{kind}ForCausalLM")(config), {"input_ids": ids()}


def llama_1b() -> Any:
    from bench_generate import MODELS

    return MODELS["llama-1.1b"](0, 0), {"input_ids": ids()}


def whisper_small() -> Any:
    import torch
    import transformers

    sizes = {"encoder_layers": 12, "decoder_layers": 12, "d_model": 768, "vocab_size": 51865}
    config = transformers.WhisperConfig(
        **sizes, encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.begin_suppress_tokens = model.generation_config.suppress_tokens = None
    return model, {"input_features": torch.randn(1, 80, 3000), "decoder_input_ids": ids(4)}


def t5_base() -> Any:
    import transformers

    config = transformers.T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids(), "decoder_input_ids": ids(4)}


LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN3 = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3 = {
    "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
}  # fmt: skip
MODELS = {
    "llama-8b": lambda: decoder("Llama", **LLAMA_8B),
    "llama-1.1b": llama_1b,
    "qwen3-0.6b": lambda: decoder("Qwen3", **QWEN3),
    "gemma3-1b": lambda: decoder("Gemma3", **GEMMA3),
    "whisper-small": whisper_small,
    "t5-base": t5_base,
}

if __name__ == "__main__":
    main()
