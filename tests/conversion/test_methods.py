"""Public methods besides forward: what they run is fused for their example calls, or the report says that it is not."""

import warnings

import pytest
import torch
import transformers
from torch import nn

from kfconvert import ConversionError, ModelConverter, auto_convert_model, load, save
from kfconvert.report import report_text


class Coder(nn.Module):
    """An autoencoder that people call by its methods."""

    def __init__(self, width=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))
        self.decoder = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 8))

    def encode(self, x):
        return self._encode(x)

    def _encode(self, x):
        return self.encoder(x)

    def decode(self, z, scale=1.0):
        return self.decoder(z * scale)

    def weights(self):
        return [self.encoder[0].weight]

    def layers(self):
        yield from self.encoder

    def forward(self, x):
        return self.decode(self.encode(x))


class Undecided(Coder):
    def forward(self, x):
        return x if x.sum() > 1e9 else super().forward(x)


def convert(model, effort="fast", **options):
    converter = ModelConverter(select="all", effort=effort)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return converter.convert_model(model.eval(), input_shape=(2, 8), **options), converter.conversion_stats


def parts(fused):
    return {path: part["hits"] for path, part in fused.kfconvert_info()["parts"].items()}


@pytest.mark.parametrize("effort", ["fast", "full"])
@pytest.mark.parametrize("kind", [Coder, Undecided])
def test_an_example_call_of_a_method_is_captured_checked_and_timed(kind, effort):
    model, z = kind(), torch.randn(5, 4)
    fused, stats = convert(model, effort, example_calls={"decode": {"z": z, "scale": 0.5}})
    forward, decode = stats["served"]
    assert decode["method"] == "decode" and decode["hits"] == {"decoder": 1} and not decode["misses"]
    assert forward["method"] is None and forward["hits"] and not forward["misses"]
    (timed,) = [method for method in stats["methods"] if method["name"] == "decode"]
    assert timed["timings"]["speedups"]["converted"]["ratio"] > 0 and timed["fused"] == ["decoder"]
    assert "decode: original" in report_text(stats)
    with torch.no_grad():
        for rows in (1, 5, 7):
            z = torch.randn(rows, 4)
            torch.testing.assert_close(fused.decode(z, 0.5), model.decode(z, 0.5))
    assert parts(fused)["decoder"] == 3


def test_full_effort_captures_what_methods_call_without_an_example():
    fused, stats = convert(Coder(), "full")
    with torch.no_grad():
        fused.decode(fused.encode(torch.randn(3, 8)))
    assert parts(fused) == {"encoder": 1, "decoder": 1}
    assert {method["name"]: method["fused"] for method in stats["methods"]} == {
        "encode": ["encoder"],
        "decode": ["decoder"],
    }


def test_the_report_says_which_methods_run_the_original():
    fused, stats = convert(Coder())
    assert not fused.kfconvert_info()["parts"]
    lines = " ".join(report_text(stats).split())
    assert "encode, decode: the original runs" in lines and "example_calls={'encode': inputs}" in lines


def test_a_method_that_misses_its_part_gets_a_capture_for_itself():
    class Images(Undecided):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
            self.decoder = nn.Sequential(nn.Conv2d(8, 3, 3, padding=1), nn.ReLU())

    model, z = Images().eval(), torch.randn(1, 8, 5, 5)
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model, input_shape=(1, 3, 8, 8), example_calls={"decode": z})
    with torch.no_grad():
        torch.testing.assert_close(fused.decode(z), model.decode(z))
        fused(torch.randn(1, 3, 8, 8))
    counts = fused.kfconvert_info()["parts"]
    assert counts["decoder"] == {"hits": 2, "misses": {}} and counts["encoder"]["hits"] == 1


def test_an_artifact_keeps_the_parts_of_methods(tmp_path):
    model, z = Coder(), torch.randn(3, 4)
    fused, _ = convert(model, example_calls={"decode": z})
    save(fused, tmp_path / "coder")
    loaded = load(tmp_path / "coder", model=Coder())
    with torch.no_grad():
        torch.testing.assert_close(loaded.decode(z), model.decode(z))
    assert parts(loaded)["decoder"] == 1
    assert [call["method"] for call in loaded.kfconvert_info()["served"]] == [None, "decode"]


@pytest.mark.exhaustive
def test_features_of_images_and_texts():
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config).eval()
    ids, images = torch.randint(2, 64, (2, 7)), torch.randn(2, 3, 16, 16)
    converter = ModelConverter(select="all", effort="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = converter.convert_model(
            model,
            example_inputs={"input_ids": ids, "pixel_values": images},
            example_calls={"get_image_features": {"pixel_values": images}, "get_text_features": {"input_ids": ids}},
        )
    served = {call["method"]: call for call in converter.conversion_stats["served"]}
    for name, value in (("get_image_features", images), ("get_text_features", ids)):
        assert served[name]["hits"] and not served[name]["misses"]
        with torch.no_grad():
            ours, theirs = getattr(fused, name)(value), getattr(model, name)(value)
        torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({"missing": torch.zeros(1)}, "'missing' is not a public method of Coder other than forward"),
        ({"_encode": torch.zeros(1)}, "'_encode' is not a public method"),
        ({"forward": torch.zeros(1)}, "'forward' is not a public method"),
        ([("decode", torch.zeros(1))], "example_calls must be a dict of method names and inputs"),
        ({"decode": torch.zeros(1, 3)}, r"Coder.decode does not accept float32\[1, 3\]"),
        ({"half": ()}, "'half' is not a public method of Coder other than forward and those of nn.Module"),
        ({"layers": ()}, "Coder.layers returns an iterator"),
    ],
)
def test_wrong_example_calls_are_one_clear_line(calls, message):
    with pytest.raises(ConversionError, match=message) as raised:
        auto_convert_model(Coder(), (2, 8), example_calls=calls)
    assert "\n" not in str(raised.value)
