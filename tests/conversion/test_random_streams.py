"""Who seeds a generator, and then uses kfconvert for the first time in a process, gets the numbers of that seed."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, json, pkgutil, random, sys
import numpy, torch

def seed():
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)

def drawn():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))

class Net(torch.nn.Sequential):
    def forward(self, x):
        if sys.argv[2] == "plain":
            return super().forward(x)
        drawn = {"torch": torch.rand_like, "numpy": lambda _: numpy.random.rand(), "python": lambda _: random.random()}
        return super().forward(x + drawn[sys.argv[2]](x))

model = Net(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
seed()
known = drawn()
seed()
import kfconvert
fused = kfconvert.ModelConverter(select="all").convert_model(model, example_inputs=torch.ones(2, 8))
kfconvert.load(kfconvert.save(fused, sys.argv[1]), model=model)
used = drawn()
seed()
for each in pkgutil.walk_packages(kfconvert.__path__, "kfconvert."):
    if "triton" not in each.name and "__main__" not in each.name and not each.name.rpartition(".")[2].startswith("_"):
        importlib.import_module(each.name)
print(json.dumps([known, used, drawn()]))
"""


@pytest.mark.parametrize("draws", ["plain", "torch", "numpy", "python"])
def test_imports_and_conversions_draw_no_numbers(tmp_path, draws):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "saved"), draws]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    known, used, imported = json.loads(run.stdout)
    assert known == used == imported
