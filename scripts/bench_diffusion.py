"""Times diffusion models of real width, with random weights, in half precision on a GPU.

    PYTHONPATH=. python scripts/bench_diffusion.py unet vae dit

Rows: the UNet of Stable Diffusion 1.5 (batch 2, 64 x 64 latents, 77 tokens), its VAE decoder (batch 1, 512 pixels), and
DiT-XL/2 (batch 2, 256 pixels). Variants, in turns: eager, ``torch.compile(mode="reduce-overhead")``, and the converted
model. Prints a markdown table: medians in milliseconds per call, and the seconds of the conversion.
"""

import argparse
import copy
import datetime
import sys
import time
import warnings
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from kfconvert import ModelConverter
from kfconvert.profiling import compare_timings

ROWS = ("unet", "vae", "dit")


class Decoder(nn.Module):
    """The decoder of a VAE."""

    def __init__(self, vae: nn.Module):
        super().__init__()
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, latents: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(latents))


def row(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model and the arguments of a call."""
    if name == "unet":
        unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
        call = {"sample": torch.randn(2, 4, 64, 64), "encoder_hidden_states": torch.randn(2, 77, 768)}
        return unet, {**call, "timestep": torch.tensor(500), "return_dict": False}
    if name == "vae":
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[128, 256, 512, 512],
            layers_per_block=2,
            sample_size=512,
        )
        return Decoder(vae), {"latents": torch.randn(1, 4, 64, 64)}
    dit = diffusers.DiTTransformer2DModel(
        num_attention_heads=16, attention_head_dim=72, out_channels=8, num_layers=28, sample_size=32, patch_size=2
    )
    call = {"hidden_states": torch.randn(2, 4, 32, 32), "timestep": torch.tensor([500, 500])}
    return dit, {**call, "class_labels": torch.tensor([3, 1000]), "return_dict": False}


def on_device(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to("cuda", torch.float16) if value.is_floating_point() else value.to("cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", choices=ROWS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}; `{' '.join(sys.argv)}`")
    print("\n| model | eager | torch.compile | kfconvert | torch.compile / kfconvert | conversion, s |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    for name in options.rows:
        torch.manual_seed(0)
        model, call = row(name)
        model, call = model.eval().to("cuda", torch.float16), {key: on_device(value) for key, value in call.items()}
        compiled = torch.compile(copy.deepcopy(model), mode="reduce-overhead")
        start = time.perf_counter()
        fused = ModelConverter().convert_model(model, example_inputs=call)
        seconds = time.perf_counter() - start
        variants = {"eager": model, "compile": compiled, "kfconvert": fused}
        with torch.no_grad():
            for each in variants.values():
                for _ in range(4):
                    each(**call)
        timings = compare_timings({key: partial(each, **call) for key, each in variants.items()}, "cuda", budget_s=3.0)
        times = [timings[key].median_ms for key in variants]
        print(
            f"| {name} | " + " | ".join(f"{each:.3f}" for each in times),
            f"{times[1] / times[2]:.2f} | {seconds:.0f} |",
            sep=" | ",
            flush=True,
        )
        torch.compiler.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
