"""What a model keeps for itself from call to call is, after a conversion, as it was before."""

import types

import pytest
import torch
from support.selection import each_once
from torch import nn

import kfconvert
from kfconvert import ConversionError, ModelConverter, load, save


class Keeping(nn.Module):
    """Counts, averages and caches in its forward, in every way that a module can."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.mean, self.count, self.seen, self.table = torch.zeros(8), 0, [], {"last": 0}
        self.kept = types.SimpleNamespace(count=0)
        self.size = None

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean * 0.9 + 0.1 * x.detach().mean(0)
        self.count += 1
        self.seen.append(self.count)
        self.table["last"] = self.count
        self.kept.count += 1
        self.size = x.shape[1]
        return torch.relu(self.linear(x)) * self.count


def state(model):
    tensors = model.calls.item(), model.mean.tolist()
    values = (*tensors, model.count, list(model.seen), dict(model.table), model.kept.count)
    return [str(value) for value in values]


@pytest.mark.filterwarnings("ignore:kfconvert")
@pytest.mark.parametrize("inplace", [False, True])
def test_a_conversion_leaves_what_a_model_keeps(inplace):
    torch.manual_seed(0)
    model, again = Keeping().eval(), Keeping().eval()
    again.load_state_dict(model.state_dict())
    before = state(model)
    fused = ModelConverter(select="all").convert_model(model, input_shape=(2, 8), inplace=inplace)
    assert state(model) == before and state(fused) == before
    x = torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(x), again(x))
    assert state(fused) == state(again)


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_so_does_one_that_fails():
    class Failing(Keeping):
        def forward(self, x):
            y = super().forward(x)
            if self.count > 1:
                raise RuntimeError("once is enough")
            return y

    model = Failing().eval()
    before = state(model)
    try:
        ModelConverter(select="all").convert_model(model, input_shape=(2, 8), inplace=True)
    except (ConversionError, RuntimeError):
        pass
    assert state(model) == before


@pytest.mark.filterwarnings("ignore:kfconvert")
def test_so_does_loading(tmp_path):
    fused = ModelConverter(select="all").convert_model(Keeping().eval(), input_shape=(2, 8))
    kfconvert.save(fused, tmp_path / "model")
    loaded = kfconvert.load(tmp_path / "model", model=Keeping())
    assert state(loaded) == state(Keeping())


def test_what_cannot_be_converted_is_one_line():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    for model in (scripted, nn.Sequential(scripted, nn.ReLU()), empty):
        with pytest.raises(ConversionError) as raised:
            ModelConverter().convert_model(model, input_shape=(2, 4))
        assert "\n" not in str(raised.value)


def test_what_fused_calls_do_not_write_is_named(tmp_path):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.size, self.calls, self.seen = nn.Linear(16, 16), None, 0, None

        def forward(self, x):
            self.size = tuple(x.shape)
            self.calls += 1
            self.seen = torch.relu(self.linear(x))
            return self.seen * 2

    converter = ModelConverter(select="all")
    fused = converter.convert_model(Counting().eval(), (3, 16))
    assert converter.conversion_stats["not_written"] == ["calls", "seen"] and fused.calls == 0
    save(fused, tmp_path / "saved")
    assert load(tmp_path / "saved", model=Counting()).kfconvert_info()["not_written"] == ["calls", "seen"]


def test_what_the_first_call_makes_goes_again_where_later_calls_change_it():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return torch.relu(self.linear(x))

    fused = ModelConverter(select="all").convert_model(Lazy().eval(), (3, 16))
    assert not hasattr(fused, "calls")
    fused(torch.randn(3, 16))
    assert fused.calls == 1


def test_lazy_modules_in_place():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    assert ModelConverter(select="all").convert_model(model, (2, 3, 8, 8), inplace=True) is model


@each_once(
    stage=["trace", "match", "select", "replace", "validate", "memory", "time"], error=[KeyboardInterrupt, MemoryError]
)
def test_a_conversion_in_place_that_is_interrupted_leaves_the_model_as_it_was(stage, error):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(16, 16), nn.GELU()).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = model(x)
    held = {name: set(vars(module)) for name, module in model.named_modules()}

    def progress(now, done, total):
        if now == stage:
            raise error

    with pytest.raises(error):
        ModelConverter(select="all").convert_model(model, example_inputs=x, inplace=True, progress=progress)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == held
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_an_error_leaves_an_earlier_conversion_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    x = torch.randn(2, 8)
    fused = ModelConverter(select="all").convert_model(model, example_inputs=x)

    def progress(now, done, total):
        if now == "time":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ModelConverter(select="all").convert_model(fused, example_inputs=x, progress=progress)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    assert fused.kfconvert_info()["guard"]["hits"] == 1


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_conversion_in_place_that_fails_leaves_modes_and_weights(dtype):
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.BatchNorm1d(8).eval()).train()
    model[2].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(4, 16)).sum().backward()
    grad = model[0].weight.grad.clone()
    with pytest.raises(ConversionError):
        ModelConverter().convert_model(model, example_inputs=torch.randn(4, 3), inplace=True, dtype=dtype)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, grad)
