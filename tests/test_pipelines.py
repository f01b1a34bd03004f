"""Pipelines of diffusers, small and random, converted component by component: the same image, by fused calls."""

import inspect
import logging
import warnings

import pytest
import torch
import transformers
from support.selection import exhaustive

from kfconvert import ModelConverter

diffusers = pytest.importorskip("diffusers")
logging.getLogger("diffusers").setLevel(logging.ERROR)


def autoencoder(**options):
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, sample_size=16, **options,
    ).eval()  # fmt: skip


def without_quantizer(shift):
    return autoencoder(use_quant_conv=False, use_post_quant_conv=False, shift_factor=shift)


def stable_diffusion():
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=2,
    ).eval()  # fmt: skip
    config = transformers.CLIPTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=1
    )
    text = transformers.CLIPTextModel(config).eval()
    scheduler = diffusers.DDIMScheduler()
    pipeline = diffusers.StableDiffusionPipeline(
        autoencoder(), text, None, unet, scheduler, None, None, requires_safety_checker=False
    )
    with torch.no_grad():
        embeddings = text(torch.randint(0, 64, (1, 77))).last_hidden_state
    inputs = {"prompt_embeds": embeddings, "negative_prompt_embeds": embeddings.flip(1)}
    return pipeline, inputs, {"unet": "forward", "vae": "decode"}


def flux():
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.FluxPipeline(scheduler, without_quantizer(0.1), None, None, None, None, transformer)
    inputs = {"prompt_embeds": torch.randn(1, 9, 16), "pooled_prompt_embeds": torch.randn(1, 16)}
    return pipeline, inputs, {"transformer": "forward", "vae": "decode"}


def wan():
    coder = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    ).eval()  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.WanPipeline(None, None, coder, scheduler, transformer)
    embeddings = torch.randn(1, 8, 16)
    inputs = {"prompt_embeds": embeddings, "negative_prompt_embeds": -embeddings, "num_frames": 5}
    return pipeline, inputs, {"transformer": "forward", "vae": "decode"}


def image_of(pipeline, inputs):
    sizes = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt"}
    generator = torch.Generator().manual_seed(0)
    return torch.as_tensor(pipeline(**inputs, **sizes, generator=generator)[0])


def first_calls(pipeline, methods):
    """By component, the arguments of its first call, put down while the pipeline runs."""
    calls = {}

    def noted(name, function):
        def call(*args, **kwargs):
            calls.setdefault(name, inspect.signature(function).bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return call

    for name, method in methods.items():
        component = getattr(pipeline, name)
        vars(component)[method] = noted(name, getattr(component, method))
    return calls


def converted(component, method, call):
    """``component`` converted for the ``call`` of its ``method``, and its statistics."""
    converter = ModelConverter(select="all", effort="fast")
    options = {"example_inputs": call}
    if method != "forward":
        frames = (5,) if isinstance(component, diffusers.AutoencoderKLWan) else ()
        options = {"example_inputs": {"sample": torch.randn(1, 3, *frames, 16, 16)}, "example_calls": {method: call}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return converter.convert_model(component, **options), converter.conversion_stats


@pytest.mark.parametrize("make", [stable_diffusion, *exhaustive(flux), pytest.param(wan, marks=pytest.mark.heavy)])
def test_a_pipeline_of_converted_components_makes_the_same_image(make):
    pipeline, inputs, methods = make()
    pipeline.set_progress_bar_config(disable=True)
    calls = first_calls(pipeline, methods)
    before = image_of(pipeline, inputs)
    for name, method in methods.items():
        component = getattr(pipeline, name)
        del vars(component)[method]
        fused, stats = converted(component, method, dict(calls[name]))
        served = [call for call in stats["served"] if call["method"] == (None if method == "forward" else method)]
        assert served[0]["hits"] and (make is wan or not served[0]["misses"])
        pipeline.register_modules(**{name: fused})
    torch.testing.assert_close(image_of(pipeline, inputs), before, rtol=1e-4, atol=1e-5)
    for name in methods:
        info = getattr(pipeline, name).kfconvert_info()
        counts = [info["guard"], *info["parts"].values()]
        assert sum(each["hits"] for each in counts)
        # The autoencoder of Wan calls one convolution with caches of other lengths in each chunk of frames.
        assert make is wan or not any(each["misses"] for each in counts), (name, counts)
