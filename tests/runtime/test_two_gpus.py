"""Models on the second GPU, and on both at once: recorded there, whatever the current device is."""

import pytest
import torch
import transformers as hf
from torch import nn

from kfconvert import ModelConverter

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x):
        return self.second(self.norm(torch.nn.functional.gelu(self.first(x))))


def converted(device):
    torch.manual_seed(0)
    model = Net().to(device).eval()
    converter = ModelConverter(select="all", cuda_graphs=True)
    return model, converter.convert_model(model, example_inputs=torch.randn(4, 32, device=device))


def assert_replayed(model, fused, device, calls=6):
    before = fused.kfconvert_info()["cuda_graphs"]["replayed"]
    with torch.no_grad():
        for seed in range(calls):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)).to(device)
            y = fused(x)
            assert y.device == x.device
            torch.testing.assert_close(y, model(x))
    assert fused.kfconvert_info()["cuda_graphs"]["replayed"] >= before + calls - 2
    assert fused.kfconvert_info()["guard"]["misses"] == {}


@pytest.mark.parametrize("current", [0, 1])
def test_the_second_gpu(current):
    with torch.cuda.device(current):
        model, fused = converted("cuda:1")
        assert_replayed(model, fused, "cuda:1")
        assert torch.cuda.current_device() == current


def test_a_model_moves_to_the_other_and_back():
    model, fused = converted("cuda:0")
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        model.to(device), fused.to(device)
        with torch.no_grad():
            for seed in range(6):
                x = torch.randn(4, 32, device=device)
                torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("current", [0, 1])
def test_generation_on_the_second_gpu(current):
    config = hf.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=256, pad_token_id=0, eos_token_id=2
    )
    torch.manual_seed(0)
    with torch.cuda.device(current):
        model = hf.GPT2LMHeadModel(config).double().to("cuda:1").eval()
        fused = ModelConverter(select="all", new_tokens=0).convert_model(model, input_shape=(2, 6))
        for sampled in (False, True):
            ids = torch.randint(3, 64, (2, 9), device="cuda:1")
            tokens = []
            for each in (model, fused):
                torch.manual_seed(1)
                tokens.append(each.generate(ids, max_new_tokens=20, do_sample=sampled))
            assert torch.equal(*tokens)
        assert fused.kfconvert_info()["generate"]["served"] == 2
