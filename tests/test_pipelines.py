"""Pipelines, small and random, whose modules are converted by a recorded run: the same results, by fused calls."""

import json
import logging

import pytest
import tokenizers
import torch
import transformers
from support.selection import exhaustive
from torch import nn

import kfconvert
from kfconvert import ConversionError, ModelConverter
from kfconvert.json_values import json_ready

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
    return pipeline, inputs, {"unet", "vae.decoder"}


def flux():
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.FluxPipeline(scheduler, without_quantizer(0.1), None, None, None, None, transformer)
    inputs = {"prompt_embeds": torch.randn(1, 9, 16), "pooled_prompt_embeds": torch.randn(1, 16)}
    return pipeline, inputs, {"transformer", "vae.decoder"}


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
    return pipeline, inputs, {"transformer", "vae.decoder"}


def image_of(pipeline, inputs):
    generator = torch.Generator().manual_seed(0)
    return torch.as_tensor(pipeline(**inputs, generator=generator)[0])


@pytest.mark.parametrize("make", [stable_diffusion, *exhaustive(flux), pytest.param(wan, marks=pytest.mark.heavy)])
def test_a_pipeline_of_diffusers_makes_the_same_image(make):
    pipeline, inputs, paths = make()
    pipeline.set_progress_bar_config(disable=True)
    inputs |= {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt"}
    before = image_of(pipeline, inputs)
    # The decoder of Wan writes to a list among its arguments, so each of its layers is captured.
    converter = ModelConverter(select="all", effort="full" if make is wan else "fast")
    assert converter.convert_model(pipeline, example_inputs=inputs) is pipeline
    stats = converter.conversion_stats
    assert stats["modules"].keys() == paths and not stats["not_converted"]
    for path, served in stats["served"].items():
        assert stats["modules"][path]["total_replaced"] and served["hits"]
        # The autoencoder of Wan calls one convolution with caches of other lengths in each chunk of frames.
        assert make is wan or not served["misses"], (path, served)
        assert path in str(stats)
    torch.testing.assert_close(image_of(pipeline, inputs), before, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def tokenizer():
    """Words "w2" to "w49" with ids of these numbers."""
    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, 50)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def texts_are_classified(tokenizer):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    return "text-classification", transformers.BertForSequenceClassification(config), {"top_k": None}


def text_is_generated(tokenizer):
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.pad_token_id = 0
    return "text-generation", model, {"max_new_tokens": 6, "do_sample": False}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [texts_are_classified, *exhaustive(text_is_generated)])
def test_a_pipeline_of_transformers_returns_the_same(make, tokenizer):
    torch.manual_seed(0)
    task, model, options = make(tokenizer)
    pipeline = transformers.pipeline(task, model=model.eval(), tokenizer=tokenizer, device="cpu")
    texts = "w2 w3 w4 w5 w6", "w7 w8 w9"
    before = [pipeline(text, **options) for text in texts]
    converter = ModelConverter(select="all", effort="fast")
    given = {{"text-generation": "text_inputs"}.get(task, "inputs"): texts[0]}
    assert converter.convert_model(pipeline, example_inputs=given | options) is pipeline
    assert pipeline.model is model
    for text, expected in zip(texts, before):
        for one, other in zip(pipeline(text, **options), expected, strict=True):
            assert one.pop("score", 0) == pytest.approx(other.pop("score", 0), rel=1e-4) and one == other
    info = model.kfconvert_info()
    assert info["guard"]["hits"] >= 2 and not info["guard"]["misses"], info["guard"]


class Encoder(nn.Module):
    """Runs its layers in a method other than forward, as the models of several libraries do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32))

    def encode(self, text, scale=1.0):
        return self.body(torch.tensor([[float(len(text))] * 8]) * scale)


class Service:
    """An object with modules in its attributes, and in a dict among these."""

    def __init__(self):
        self.encoder, self.heads = Encoder().eval(), {"score": nn.Sequential(nn.Linear(32, 4), nn.ReLU()).eval()}

    def __call__(self, text):
        return self.heads["score"](self.encoder.encode(text))


def test_any_object_that_runs_modules_is_a_pipeline():
    service = Service()
    before = service("words")
    converter = ModelConverter(select="all", effort="fast")
    assert converter.convert_model(service, example_inputs="words") is service
    stats = converter.conversion_stats
    assert stats["served"] == {
        "encoder.body": {"hits": 1, "misses": {}},
        "heads.score": {"hits": 1, "misses": {}},
    }
    assert json.loads(json.dumps(json_ready(stats)))["pipeline"] == "Service"
    assert service.encoder.body.kfconvert_info()["guard"] == {"hits": 0, "misses": {}}
    with torch.no_grad():
        torch.testing.assert_close(service("words"), before)
    with pytest.raises(ConversionError, match="not a pipeline"):
        converter.explain()


def test_the_most_frequent_kind_of_call_is_the_example():
    body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32)).eval()
    inputs = [torch.ones(1, 2, 8), torch.ones(3, 8), 2 * torch.ones(3, 8), torch.ones(1, 1, 2, 8)]
    converter = ModelConverter(select="all", effort="fast")
    converter.convert_model(lambda steps: [body(x) for x in steps], example_inputs=inputs)
    assert converter.conversion_stats["modules"]["Sequential"]["inputs"] == "input=float32[3, 8]"
    assert converter.conversion_stats["served"]["Sequential"]["hits"] == 2


def test_a_method_alone_may_be_the_example_of_a_module():
    model = Encoder().eval()
    converter = ModelConverter(select="all", effort="fast")
    converted = converter.convert_model(model, example_calls={"encode": {"text": "words", "scale": 2.0}})
    assert type(converted) is Encoder and converted is not model
    with torch.no_grad():
        torch.testing.assert_close(converted.encode("text"), model.encode("text"))
    assert converted.body.kfconvert_info()["guard"]["hits"] == 1 and not hasattr(model.body, "kfconvert_info")


@pytest.mark.parametrize(
    ("pipeline", "options", "reason"),
    [
        (3, {"example_inputs": "words"}, "expected a torch.nn.Module or a pipeline, got int"),
        (Service, {"example_inputs": "words"}, "expected a torch.nn.Module or a pipeline, got type"),
        (Service(), {}, "a Service needs example_inputs"),
        (Service(), {"example_inputs": 3}, "the example calls of the pipeline raise an error: object of type 'int'"),
        (Service(), {"example_inputs": "words", "dtype": torch.float16}, "takes none of input_shape, device, dtype"),
        (Service(), {"example_calls": {"run": "words"}}, "'run' is not a public method of Service"),
        (len, {"example_inputs": "words"}, "a run of builtin_function_or_method calls no torch.nn.Module with"),
        (lambda x: nn.Linear(4, 4)(x), {"example_inputs": torch.ones(4)}, "calls no torch.nn.Module with submodules"),
    ],
)
def test_what_is_no_pipeline_is_refused_in_one_line(pipeline, options, reason):
    with pytest.raises(ConversionError) as raised:
        kfconvert.auto_convert_model(pipeline, **options)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_modules_that_cannot_be_converted_are_reported():
    service = Service()
    service.heads["score"] = nn.Sequential(torch.jit.script(nn.Linear(32, 4)))
    converter = ModelConverter(select="all", effort="fast")
    converter.convert_model(service, example_inputs="words")
    stats = converter.conversion_stats
    assert stats["served"].keys() == {"encoder.body"} and "TorchScript" in stats["not_converted"]["heads.score"]
    assert "heads.score: not converted: " in str(stats)


def encoder_decoder():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model, ids = transformers.T5ForConditionalGeneration(config).eval(), torch.randint(2, 64, (1, 7))

    def answer(input_ids):
        return model.generate(input_ids=input_ids, max_new_tokens=5, do_sample=False)

    return answer, {"example_inputs": ids}, lambda pipe: pipe(ids)


def sentences():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = transformers.BertModel(config)

        def tokenize(self, texts, **_):
            return {"input_ids": torch.tensor([[ord(letter) % 50 for letter in text[:5]] for text in texts])}

        preprocess = tokenize

        def forward(self, features):
            ids = features["input_ids"]
            return {"token_embeddings": head(self.body(ids).last_hidden_state), "attention_mask": torch.ones_like(ids)}

    model = sentence_transformers.SentenceTransformer(modules=[Words(), modules.Pooling(8)], device="cpu").eval()
    texts = ["words and words", "other words"]
    return model, {"example_calls": {"encode": (texts,)}}, lambda pipe: torch.as_tensor(pipe.encode(texts))


def open_clip():
    clip = pytest.importorskip("open_clip.model")
    vision = clip.CLIPVisionCfg(layers=1, width=32, head_width=16, patch_size=8, image_size=32)
    model = clip.CLIP(
        32, vision, clip.CLIPTextCfg(context_length=16, vocab_size=64, width=32, heads=2, layers=1)
    ).eval()
    image, ids = torch.randn(2, 3, 32, 32), torch.randint(1, 64, (2, 16))
    calls = {"encode_image": image, "encode_text": ids}
    return model, {"example_calls": calls}, lambda pipe: torch.cat([pipe.encode_image(image), pipe.encode_text(ids)])


def yolo():
    model = pytest.importorskip("ultralytics").YOLO("yolo11n.yaml")
    image = torch.randint(0, 255, (64, 64, 3), dtype=torch.uint8).numpy()
    call = {"source": image, "imgsz": 64, "verbose": False, "conf": 1e-4}
    return model, {"example_calls": {"predict": call}, "inplace": True}, lambda pipe: pipe.predict(**call)[0].boxes.data


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        *exhaustive(encoder_decoder),
        *(pytest.param(each, marks=pytest.mark.heavy) for each in (sentences, open_clip, yolo)),
    ],
)
def test_pipelines_of_other_libraries_return_the_same(make):
    torch.manual_seed(0)
    pipeline, given, run = make()
    converter = ModelConverter(select="all", effort="fast")
    with torch.no_grad():
        before = run(pipeline)
        converted = converter.convert_model(pipeline, **given)
        torch.testing.assert_close(run(converted), before, rtol=1e-4, atol=1e-5)
    stats = converter.conversion_stats
    assert stats["modules"] and not stats["not_converted"]
    for path, served in stats["served"].items():
        assert stats["modules"][path]["total_replaced"] and served["hits"] and not served["misses"], (path, served)
