"""The examples for many machines and many requests, in processes of their own: those of torchrun, Ray and LitServe."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
EXAMPLES, SCRIPTS = ROOT / "examples", ROOT / "scripts"


def finished(*arguments):
    """What these arguments of Python printed, once they have come to their end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KFCONVERT_CACHE": "off"}
    environment.pop("RANK", None)
    process = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def on_two_ranks(example, *options):
    """What the small form of an example printed on each of two ranks."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = finished(*start, EXAMPLES / example, "--small", "--device", "cpu", *options)
    # What libraries of the other rank print may stand before, in the same line.
    return [re.findall(rf"rank {rank}: (.*)", out) for rank in range(2)]


@pytest.mark.parametrize("example", ["train_ddp", "tensor_parallel"])
def test_without_torchrun_one_line_says_what_starts_it(example, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=rf"^torchrun starts the processes: torchrun .* examples/{example}\.py$"):
        importlib.import_module(example).main(["--small"])


@pytest.mark.heavy
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize("options", [[], ["--fsdp"], ["--training"], ["--fsdp", "--training"]])
def test_gradients_of_a_converted_model_are_those_of_the_original_on_every_rank(options):
    for lines in on_two_ranks("train_ddp.py", *options):
        assert any("gradients equal: True, on all ranks: True" in line for line in lines), lines
        assert any(line.startswith(f"{10 * ('--training' in options)} of 10 steps compiled") for line in lines), lines
        assert any(line.startswith("after eval(), it is off by") for line in lines), lines


@pytest.mark.heavy
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_ranks_compute_what_the_whole_model_does():
    for lines in on_two_ranks("tensor_parallel.py"):
        assert re.match("18 of 18 sites fused: add_rms_norm, gated_linear_silu, .*merged_linear", lines[0]), lines
        assert lines[-2].startswith("off by") and lines[-2].endswith("the same text: True"), lines
        assert re.fullmatch(r"9 calls of the program, 0 misses", lines[-1]), lines


@pytest.mark.parametrize(
    ("example", "package", "line"),
    [
        ("ray_data_inference", "ray", "the workers are those of Ray Data: pip install 'ray[data]'"),
        ("serve_litserve", "litserve", "the service is LitServe's: pip install litserve"),
        ("serve_language_model", "litserve", "the service is LitServe's: pip install litserve"),
        ("serve_ray", "ray", "the replicas are Ray Serve's: pip install 'ray[serve]'"),
    ],
)
def test_without_a_package_an_example_says_how_to_get_it(example, package, line, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, example, raising=False)
    with pytest.raises(SystemExit) as raised:
        importlib.import_module(example).main(["--small"])
    assert str(raised.value) == line


@pytest.mark.heavy
def test_ray_data_names_each_row_as_the_original_does():
    pytest.importorskip("ray.data")
    out = finished(EXAMPLES / "ray_data_inference.py", "--small", "--device", "cpu")
    assert "450 images, 0 lost, run by the program: True" in out
