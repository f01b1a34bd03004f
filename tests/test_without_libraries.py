"""What needs no torchvision, transformers, timm or diffusers works where they cannot be imported. The families of
kernels are imported when they are used."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchvision", "transformers", "timm", "diffusers", "huggingface_hub"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import torch
import kfconvert
from kfconvert import kernels, modules, ops

assert not [name for name in sys.modules if name.startswith("kfconvert.kernels.")]
kernels.cpu, kernels.cuda, kernels.reference
assert "kfconvert.kernels.triton" not in sys.modules

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
converter = kfconvert.ModelConverter(select="all")
fused = converter.convert_model(model, (2, 8))
kfconvert.save(fused, sys.argv[1])
again = kfconvert.load(sys.argv[1], model=torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()))
x = torch.randn(2, 8)
with torch.no_grad():
    torch.testing.assert_close(again(x), model(x))
assert again.kfconvert_info()["total_replaced"] == 1, converter.conversion_stats
assert kfconvert.validate_optimization(model, fused, x).passed
"""


def test_a_plain_module_is_converted_saved_and_loaded(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "saved")]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
