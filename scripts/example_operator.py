"""An operator of your own from end to end: softcap(x, cap) = cap * tanh(x / cap), with a CUDA kernel.

    PYTHONPATH=. python scripts/example_operator.py

The kernels are in example_operator.cu, which is compiled at the first run and cached. Everything else that
torch wants to know about an operator is here, step by step. Without a GPU the kernels are compiled but not
run, and the checks are those of the CPU.
"""

from pathlib import Path

import torch

import kfconvert

# 1. The schemas: names, types, and that nothing is written to. They are here and not in the .cu, so that the
#    operators exist where it cannot be compiled.
torch.library.define("example::softcap", "(Tensor x, float cap) -> Tensor")
torch.library.define("example::softcap_backward", "(Tensor grad, Tensor y, float cap) -> Tensor")


# 2. The definition in plain PyTorch, for every device that has no kernel.
@torch.library.impl("example::softcap", "default")
def _(x, cap):
    return torch.tanh(x / cap).mul_(cap).contiguous()


@torch.library.impl("example::softcap_backward", "default")
def _(grad, y, cap):
    return (grad * (1 - (y / cap) ** 2)).contiguous()


# 3. The fake kernels: shape, dtype, device and strides of the result, for torch.compile and torch.export.
@torch.library.register_fake("example::softcap")
def _(x, cap):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("example::softcap_backward")
def _(grad, y, cap):
    return torch.empty_like(y)


# 4. The gradient, which needs only the output.
def _save(ctx, inputs, output):
    _, ctx.cap = inputs
    ctx.save_for_backward(output)


def _differentiate(ctx, grad):
    (y,) = ctx.saved_tensors
    return torch.ops.example.softcap_backward(grad, y, ctx.cap), None


torch.library.register_autograd("example::softcap", _differentiate, setup_context=_save)


# 5. What users call, with a docstring and without torch.ops.
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap): x of any shape, float32 or float64; the result is contiguous."""
    return torch.ops.example.softcap(x, cap)


# 6. The CUDA kernels.
def load_kernels() -> None:
    """Raises kfconvert.CompileError: there is no compiler, or it reports errors."""
    source = Path(__file__).with_suffix(".cu")
    kfconvert.get_cuda_compiler().compile_from_file(source, "example_operator")


def check(device: str) -> None:
    """The result is the definition's, the gradient is that of the result, and torch can trace both."""
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(37, 64, device=device, dtype=dtype)
        torch.testing.assert_close(softcap(x, 2.0), 2.0 * torch.tanh(x / 2.0))
        torch.testing.assert_close(softcap(x.t(), 2.0), softcap(x, 2.0).t())
    x = torch.randn(5, 7, device=device, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(softcap, (x, 2.0))
    torch.library.opcheck(torch.ops.example.softcap.default, (x, 2.0))
    torch.library.opcheck(torch.ops.example.softcap_backward.default, (x.detach(), x.detach(), 2.0))


def traced_shape() -> torch.Size:
    """The shape of a result on a GPU that need not be there: tracing runs fake kernels only."""
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(8, 128, device="cuda")
        return softcap(x, 30.0).shape


def main() -> None:
    load_kernels()
    print("kernels: compiled and registered for CUDA")
    print(f"traced with fake tensors on a GPU: {tuple(traced_shape())}")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        check(device)
        print(f"{device}: values, gradcheck and opcheck passed")
    if "cuda" not in devices:
        print("cuda: torch finds no GPU, the kernels were NOT run")


if __name__ == "__main__":
    main()
