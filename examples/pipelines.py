"""A pipeline of diffusers that makes images and one of transformers that classifies them: one call converts each.

    python examples/pipelines.py [painter] [classifier] [--small] [--device cuda] [--autocast]

You learn that a pipeline is its own example: kfconvert runs it once, converts the modules that it calls, in place, and
says which of its calls then ran fused. With --autocast everything runs under torch.autocast in bfloat16, as the
conversion has to do then. Weights are random, so the images show noise.
"""

import copy
from contextlib import nullcontext

import diffusers
import torch
import transformers
from shared import options_of

import kfconvert

diffusers.logging.set_verbosity_error()


def painter(small):
    """A text-to-image pipeline without a text encoder, and the arguments of a call: embeddings in place of a prompt."""
    blocks = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    widths, size, groups = ((8, 16), 8, 4) if small else ((320, 640), 64, 32)
    unet = diffusers.UNet2DConditionModel(
        sample_size=size, layers_per_block=1, block_out_channels=widths, norm_num_groups=groups,
        down_block_types=blocks[0], up_block_types=blocks[1], cross_attention_dim=widths[0], attention_head_dim=2,
    ).eval()  # fmt: skip
    coder = diffusers.AutoencoderKL(
        block_out_channels=widths, layers_per_block=1, norm_num_groups=groups, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()  # fmt: skip
    scheduler = diffusers.EulerDiscreteScheduler()
    pipe = diffusers.StableDiffusionPipeline(
        coder, None, None, unet, scheduler, None, None, requires_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    prompts = {name: torch.randn(1, 77, widths[0]) for name in ("prompt_embeds", "negative_prompt_embeds")}
    return pipe, {**prompts, "height": 2 * size, "width": 2 * size, "num_inference_steps": 2, "output_type": "pt"}


def classifier(small):
    """An image-classification pipeline and an image."""
    size = (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2} if small else {}
    )
    config = transformers.ViTConfig(image_size=64, patch_size=16, num_labels=10, **size)
    pipe = transformers.pipeline(
        "image-classification",
        model=transformers.ViTForImageClassification(config).eval(),
        image_processor=transformers.ViTImageProcessor(size={"height": 64, "width": 64}),
        device="cpu",
    )
    return pipe, {"inputs": transformers.image_utils.PIL.Image.new("RGB", (80, 60), "red"), "top_k": 10}


def numbers(result):
    """What a pipeline returned, as one tensor: an image, or the score of each class."""
    if isinstance(result, list):
        return torch.tensor([each["score"] for each in sorted(result, key=lambda each: each["label"])])
    return torch.as_tensor(result.images).float().cpu()


def main(argv=None):
    parser = options_of(__doc__)
    parser.add_argument("names", nargs="*", choices=("painter", "classifier", []), help="pipelines  [default: both]")
    parser.add_argument("--autocast", action="store_true", help="run under torch.autocast in bfloat16")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    for make in [each for each in (painter, classifier) if each.__name__ in (options.names or each.__name__)]:
        torch.manual_seed(0)
        pipe, call = make(options.small)
        original = copy.deepcopy(pipe)
        for each in (pipe, original):
            if isinstance(each, diffusers.DiffusionPipeline):
                each.to(device)
            else:
                each.model.to(device)
                each.device = device
        converter = kfconvert.ModelConverter(**({"effort": "fast", "select": "all"} if options.small else {}))
        with torch.autocast(device.type, torch.bfloat16) if options.autocast else nullcontext():
            converter.convert_model(pipe, example_inputs=call)
            torch.manual_seed(1)
            expected = numbers(original(**call))
            torch.manual_seed(1)
            found = numbers(pipe(**call))
        print(type(pipe).__name__)
        for path, stats in converter.conversion_stats["modules"].items():
            served = converter.conversion_stats["served"][path]
            print(f"  {path}: {stats['total_replaced']} of {stats['total_found']} sites fused, {served}")
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < (0.1 if options.autocast else 1e-3), error
        print(f"  largest difference of the results, relative to the largest value: {error:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
