"""Who seeds a generator, and then uses kfconvert for the first time in a process, gets the numbers of that seed."""

import json
import subprocess
import sys

SCRIPT = """
import importlib, json, pkgutil, random, sys
import numpy, torch

def seed():
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)

def drawn():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))

DRAWS = {
    "nothing": lambda x: 0.0,
    "torch": torch.rand_like,
    "numpy": lambda _: numpy.random.rand(),
    "python": lambda _: random.random(),
}

class Net(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x + DRAWS[self.draws](x))

seed()
found = [drawn()]
for name in DRAWS:
    model = Net(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
    model.draws = name
    seed()
    import kfconvert
    converter = kfconvert.ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model, example_inputs=torch.ones(2, 8))
    kfconvert.load(kfconvert.save(fused, f"{sys.argv[1]}/{name}"), model=model)
    found.append(drawn())
seed()
for each in pkgutil.walk_packages(kfconvert.__path__, "kfconvert."):
    if "triton" not in each.name and "__main__" not in each.name and not each.name.rpartition(".")[2].startswith("_"):
        importlib.import_module(each.name)
found.append(drawn())
print(json.dumps(found))
"""


def test_imports_and_conversions_draw_no_numbers(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    first, *others = json.loads(run.stdout)
    assert others == [first] * 5
