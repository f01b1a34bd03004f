import subprocess
import sys
from pathlib import Path

import torch
from support.devices import compiled_operators

from kfconvert import extension, ops
from kfconvert.cli import doctor


def test_flags_and_facts_agree():
    assert extension.EXTENSION_LOADED == ("cpu" not in extension.load_errors)
    assert extension.CUDA_AVAILABLE == (extension.CUDA_KERNELS_LOADED and torch.cuda.is_available())


def test_compiled_operators_are_complete():
    for device in ("cpu", "cuda"):
        if device in extension.load_errors:
            assert not compiled_operators(device)
            continue
        names = set(dir(torch.ops.kfconvert)) & {op.partition("::")[2] for op in torch._C._dispatch_get_all_op_names()}
        others = (
            {"decode_attention_", "next_token_", "norm_linear", "quantized_linear", "skinny_linear"}
            if device == "cpu"
            else set()
        )
        in_python = {"attention_triton", "linear_triton", "linear_cross_entropy"}
        assert names - others - in_python <= compiled_operators(device)
        assert {"bias_act", "linear_act", "conv_act", "layer_norm_act"} <= compiled_operators(device)


def test_doctor_says_what_to_do():
    checks = doctor.doctor()
    assert {"CPU kernels", "CUDA GPU", "CUDA kernels", "compiled guard"} <= {check.name for check in checks}
    for name, ok, detail, advice in checks:
        assert name and detail and advice and isinstance(ok, bool)


def test_which_gpus_a_build_runs_on():
    assert doctor._runs_on("80", "86", has_ptx=False) and not doctor._runs_on("80", "90", has_ptx=False)
    assert doctor._runs_on("90", "120", has_ptx=True) and not doctor._runs_on("90", "80", has_ptx=True)


def test_without_any_library(tmp_path):
    """The package as a machine without a compiler has it: same operators, plain ATen, the reason told."""
    package = Path(extension.__file__).parent
    code = """
import warnings
from pathlib import Path
exists = Path.exists
Path.exists = lambda self, **k: False if self.name.startswith("_ops_") else exists(self, **k)
warnings.simplefilter("error")
import torch
from kfconvert import extension, ops
assert not extension.EXTENSION_LOADED and not extension.CUDA_AVAILABLE
assert "was not built" in extension.load_errors["cpu"]
x, w, b = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
want = torch.relu(torch.nn.functional.linear(x, w, b))
assert torch.equal(ops.linear_act(x, w, b, "relu"), want)
assert torch.equal(torch.ops.kfconvert.linear_act(x, w, b, 1, 0.01), want)
leaf = x.double().requires_grad_()
assert torch.autograd.gradcheck(lambda t: torch.ops.kfconvert.bias_act(t, None, None, 2, 0.01, -1), leaf)
norm = lambda t: torch.ops.kfconvert.layer_norm_act(t, None, [8], None, None, 1e-5, 5, 0.01)
assert torch.autograd.gradcheck(norm, leaf)
y = torch.ones(2, 3)
torch.ops.kfconvert.bias_act_(y, -2 * torch.ones(3), None, 1, 0.01, -1)
assert not y.any()
torch.library.opcheck(torch.ops.kfconvert.bias_act.default, (x, None, None, 2, 0.01, -1))
arguments = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), None, None, [1], [0], [1], 1, 0, 0.01
torch.library.opcheck(torch.ops.kfconvert.conv_act_inference.default, arguments)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=package.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_library_that_does_not_load_is_reported(tmp_path, monkeypatch, recwarn):
    (tmp_path / "_ops_cpu.so").write_bytes(b"not a library")
    monkeypatch.setattr(extension, "_FOLDER", tmp_path)
    monkeypatch.setattr(extension, "load_errors", {})
    assert not extension._load("cpu")
    assert "invalid ELF header" in extension.load_errors["cpu"] or "too short" in extension.load_errors["cpu"]
    assert any("could not be loaded" in str(warning.message) for warning in recwarn)


def test_operators_work_on_the_meta_device():
    x = torch.empty(4, 8, device="meta")
    assert ops.bias_act(x, activation="gelu").shape == (4, 8)
    assert ops.layer_norm_act(x, 8).device.type == "meta"
