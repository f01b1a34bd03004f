"""How long a conversion takes on CPU, by stage: BERT-base and ResNet-50 at usual sizes, or models of the coverage.

    PYTHONPATH=. python scripts/bench_conversion.py --threads 2 16
    PYTHONPATH=. python scripts/bench_conversion.py --threads 16 --models ssd300_vgg16 vit_h_14
    PYTHONPATH=. python scripts/bench_conversion.py --efforts fast full

Every conversion runs in a process of its own: the first in a process also loads what PyTorch's exporter imports. Each
is done twice: the second finds the times that the first has remembered.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

USUAL = ("bert-base", "resnet50")
STAGES = ("prepare", "trace", "match", "select", "replace", "validate", "memory", "time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(USUAL), help=f"{USUAL}, or names in the coverage")
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--efforts", nargs="+", default=["full"], help="fast, full")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(conversion(options.one, options.threads[0], options.efforts[0])))
        return
    import torch

    print(f"{platform.machine()} CPU, float32, {datetime.date.today().isoformat()}; torch {torch.__version__}")
    print(f"`PYTHONPATH=. python {shlex.join(['scripts/bench_conversion.py', *sys.argv[1:]])}`\n")
    print(f"| model | threads | effort | remembered | seconds | {' | '.join(STAGES)} | sites |")
    print(f"|---|---:|---|---:|---:|{'---:|' * len(STAGES)}---:|")
    for model, threads, effort in itertools.product(options.models, options.threads, options.efforts):
        command = [sys.executable, __file__, "--one", model, "--threads", str(threads), "--efforts", effort]
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                environment = os.environ | {"KFCONVERT_CACHE": folder}
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
                row = json.loads(done.stdout.splitlines()[-1])
                stages = " | ".join(f"{row['stages'].get(stage, 0.0):.1f}" for stage in STAGES)
                told = f"{model} | {threads} | {effort} | {row['remembered']} | {row['seconds']:.1f} | {stages}"
                print(f"| {told} | {row['sites']} |", flush=True)


def conversion(name: str, threads: int, effort: str) -> dict[str, Any]:
    """Seconds of one conversion of the model ``name``, in all and by stage (what is in none of them is preparation),
    how many times were remembered, and the number of sites applied."""
    import torch

    from kfconvert import ModelConverter

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    model, inputs = made(name)
    converter = ModelConverter(effort=effort)
    start = time.perf_counter()
    converter.convert_model(model, device="cpu", example_inputs=inputs)
    seconds = time.perf_counter() - start
    stats = converter.conversion_stats
    stages = stats["seconds"] | {"prepare": seconds - sum(stats["seconds"].values())}
    return {
        "seconds": seconds,
        "stages": stages,
        "remembered": stats["remembered"],
        "sites": stats["total_replaced"],
    }


def made(name: str) -> tuple[Any, Any]:
    """The model and its example inputs, of batch 1 for the two usual ones."""
    import torch
    import torchvision
    import transformers
    from coverage_models import entries

    torch.manual_seed(0)
    if name == "bert-base":
        model = transformers.BertModel(transformers.BertConfig()).eval()
        return model, {"input_ids": torch.randint(0, 30_000, (1, 128))}
    if name == "resnet50":
        return torchvision.models.resnet50().eval(), torch.randn(1, 3, 224, 224)
    return next(entry for entry in entries() if name in (entry.name, entry.name.split("/")[-1])).make()


if __name__ == "__main__":
    main()
