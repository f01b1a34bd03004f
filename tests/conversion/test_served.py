"""Every applied site has served an example call, whatever the modules of one structure receive."""

import warnings

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter
from kfconvert.runtime.dispatch.guarded import GuardedForward


class Whole(nn.Module):
    """Control flow on data: the model is captured by its parts."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def undecided(self, x):
        return x.sum() > 1e9


class Chain(Whole):
    def forward(self, x):
        for part in self.parts:
            if self.undecided(x):
                break
            x = part(x)
        return x


class TwoStreams(Whole):
    """Blocks of one structure that receive other fixed sizes, as streams of a diffusion transformer and the norms of
    grouped-query attention do."""

    def __init__(self):
        block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
        super().__init__(block(), block(), nn.RMSNorm(16), nn.RMSNorm(16))

    def forward(self, image, text):
        if self.undecided(image):
            return image
        first, second, q_norm, k_norm = self.parts
        image, text = first(image), second(text)
        q, k = q_norm(image.unflatten(2, (4, 16))), k_norm(text[..., :32].unflatten(2, (2, 16)))
        return torch.cat([image, text], 1), q, k


class Sliced(Whole):
    """A block that receives slices of a tensor, as those of streams and videos do."""

    def __init__(self):
        convs = nn.Conv1d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 16, 3, padding=1), nn.ReLU()
        super().__init__(nn.Sequential(*convs))

    def forward(self, x):
        if self.undecided(x):
            return x
        return torch.cat([self.parts[0](part) for part in x.split(8, 2)], 2)


class PixelAttention(nn.Module):
    """Its outputs are transposed: of one image the strides are those of no memory format."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.linear = nn.GroupNorm(4, width), nn.Linear(width, width)

    def forward(self, x):
        rows = self.norm(x).flatten(2).transpose(1, 2)
        return self.linear(rows).transpose(1, 2).reshape(x.shape) + x


def convs(width=16):
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


MODELS = {
    "streams": (TwoStreams, lambda batch: (torch.randn(batch, 24, 64), torch.randn(batch, 9, 64))),
    "slices": (Sliced, lambda batch: (torch.randn(batch, 16, 24),)),
    "images": (
        lambda: Chain(convs(), PixelAttention(), convs(), PixelAttention(), convs()),
        lambda batch: (torch.randn(batch, 16, 8, 8),),
    ),
    "transposed images": (
        lambda: Chain(convs(), PixelAttention(), convs(), PixelAttention(), convs()),
        lambda batch: (torch.randn(batch, 16, 8, 8).to(memory_format=torch.channels_last),),
    ),
}


def convert(model, example, effort="fast", **options):
    converter = ModelConverter(select="all", effort=effort)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return converter.convert_model(model, example_inputs=example, **options), converter.conversion_stats


@pytest.mark.parametrize(
    ("name", "batch"), [("streams", 2), ("slices", 1), ("images", 1), ("images", 2), ("transposed images", 1)]
)
def test_every_part_serves_the_example(name, batch):
    make, inputs = MODELS[name]
    model, example = make().eval(), inputs(batch)
    fused, stats = convert(model, example)
    (served,) = stats["served"]
    parts = fused.kfconvert_info()["parts"]
    assert set(served["hits"]) == set(parts) and not served["misses"] and stats["total_replaced"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fused(*example), model(*example), rtol=1e-4, atol=1e-5)
    assert all(part["hits"] and not part["misses"] for part in fused.kfconvert_info()["parts"].values())


def test_a_program_that_serves_no_example_call_is_not_applied(monkeypatch):
    refuse = GuardedForward.state_refusal
    monkeypatch.setattr(
        GuardedForward, "state_refusal", lambda self: "refused" if self.path == "parts.1" else refuse(self)
    )
    fused, stats = convert(Chain(convs(), convs(), convs()).eval(), torch.randn(2, 16, 8, 8))
    assert set(fused.kfconvert_info()["parts"]) == {"parts.0", "parts.2"} == set(stats["served"][0]["hits"])
    refused = [site for site in stats["sites"] if site["status"] != "applied"]
    assert [site["region"] for site in refused] == ["parts.1"]
    assert refused[0]["reason"] == "parts.1 serves no example call: refused"
