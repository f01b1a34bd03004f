"""Models of which nothing is fused are given back as they were, unless replays of their programs are faster."""

import copy
import pickle
import warnings

import pytest
import torch
from support.small_models import bert, guard
from torch import nn

import kfconvert
import kfconvert.conversion.pipeline
from kfconvert import ArtifactError, ModelConverter
from kfconvert.artifact import replay
from kfconvert.profiling import Comparison
from kfconvert.report import prometheus_text
from kfconvert.runtime import guarded_forward
from kfconvert.runtime.dispatch.guarded import NOTHING_FUSED

pytestmark = pytest.mark.filterwarnings("ignore:kfconvert fused nothing")


class Blocks(nn.Module):
    """A graph can be made of it, and of each of its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Branching(Blocks):
    """No graph can be made of it as a whole."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.sum() > 1e30:
                break
        return x


MODELS = {
    "identity": (nn.Identity, torch.randn(2, 4)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten()), torch.randn(1, 3, 8, 8)),
    "embedding": (lambda: nn.Embedding(10, 8), torch.randint(10, (2, 3))),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), torch.randn(2, 8)),
    "blocks": (Blocks, torch.randn(2, 8)),
    "branching": (Branching, torch.randn(2, 8)),
}


def with_times(monkeypatch, converted=1.0):
    """From now on a converted model takes so many times the time of the original, and all else twice that."""

    def compare(candidates, device, **options):
        known = {"original": 1.0, "converted": converted}
        return Comparison({name: [known.get(name, 2.0)] * 20 for name in candidates})

    for module in ("selector", "timing"):
        monkeypatch.setattr(f"kfconvert.conversion.{module}.compare_timings", compare)


@pytest.fixture
def recordable(monkeypatch):
    """As on a GPU, but for the recordings."""
    monkeypatch.setattr(kfconvert.conversion.pipeline, "can_record", lambda device: True)
    monkeypatch.setattr(replay, "can_record", lambda device: True)


def made(name, **options):
    """A model, and what is made of it where nothing is fused, with the converter."""
    make, x = MODELS[name]
    model, converter = make().eval(), ModelConverter(**options)
    with pytest.warns(UserWarning, match="fused nothing in "):
        return model, converter.convert_model(model, example_inputs=x), converter


def assert_given_back(name, model, fused):
    """``fused`` runs what ``model`` runs, with nothing around it, and tells why."""
    for module in fused.modules():
        assert "forward" not in vars(module) and guarded_forward(module) is None
    assert type(fused) is type(model) and not fused.training
    with torch.no_grad():
        assert torch.equal(fused(MODELS[name][1]), model(MODELS[name][1]))
    info = fused.kfconvert_info()
    assert info["given_back"] and info["given_back"] == info["nothing_fused"] and info["speedup_achieved"] is None
    assert info["guard"] == {"hits": 0, "misses": {}} and not info["parts"] and not info["switched_off"]
    assert "Nothing was fused, so the original is returned: " in " ".join(str(info).split())
    fused.kfconvert_refresh()


@pytest.mark.parametrize(("name", "effort"), [*((name, "fast") for name in MODELS), ("blocks", "full")])
def test_the_original_is_given_back(name, effort, monkeypatch):
    with_times(monkeypatch)
    model, fused, converter = made(name, effort=effort)
    assert_given_back(name, model, fused)
    assert converter.conversion_stats["given_back"] in str(converter.explain())


def test_the_original_is_given_back_where_no_site_is_found():
    model, fused, converter = made("pooling", select="all")
    assert converter.conversion_stats["total_found"] == 0
    assert_given_back("pooling", model, fused)


def test_a_model_of_which_nothing_is_captured_is_given_back():
    class DataDependent(nn.Module):
        def forward(self, x):
            return torch.relu(x) if x.sum() > 0 else x

    converter = ModelConverter(effort="fast")
    with pytest.warns(UserWarning, match="could not be captured: "):
        fused = converter.convert_model(DataDependent(), input_shape=(2, 4))
    assert converter.conversion_stats["regions"][0]["captured"] is False and guarded_forward(fused) is None


@pytest.mark.parametrize("name", ["identity", "mlp", "branching"])
def test_what_is_given_back_can_be_used_as_a_converted_model(name, monkeypatch, tmp_path):
    with_times(monkeypatch)
    model, fused, _ = made(name, effort="fast")
    for duplicate in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert_given_back(name, model, duplicate)
    assert prometheus_text({"model": fused})
    assert kfconvert.freeze(fused) is fused
    assert_given_back(name, model, fused.train().eval())
    with pytest.raises(ArtifactError, match="nothing is fused in the model as a whole; use torch.export.export"):
        kfconvert.export(fused, MODELS[name][1])
    kfconvert.save(fused, tmp_path / "saved")
    monkeypatch.setattr("kfconvert.artifact.files.replay", lambda *_: pytest.fail("it is converted again"))
    loaded = kfconvert.load(tmp_path / "saved", model=copy.deepcopy(model).train())
    assert_given_back(name, model, loaded)
    again = ModelConverter(select="all").convert_model(loaded, example_inputs=MODELS[name][1])
    assert bool(again.kfconvert_info()["total_replaced"]) == (name != "identity")


def test_a_model_of_transformers_that_is_given_back_is_saved(tmp_path):
    model = bert()
    converter = ModelConverter(effort="fast", filter_fn=lambda module, name: False)
    fused = converter.convert_model(model, input_shape=(2, 7))
    assert converter.conversion_stats["given_back"] and guarded_forward(fused) is None
    fused.save_pretrained(tmp_path / "saved")
    loaded = kfconvert.load(tmp_path / "saved")
    assert guarded_forward(loaded) is None and loaded.kfconvert_info()["given_back"]
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


class Tokens(nn.Module):
    """Something can be fused in calls without a mask, or in those with one."""

    def __init__(self, masked: bool):
        super().__init__()
        self.masked, self.embedding, self.linear = masked, nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        fusable = self.masked == (attention_mask is not None)
        return nn.functional.gelu(self.linear(x)) if fusable else nn.functional.softplus(x)


@pytest.mark.parametrize("masked", [False, True])
def test_call_forms_in_which_nothing_is_fused_run_the_original(masked, tmp_path):
    model, ids = Tokens(masked).eval(), torch.randint(10, (2, 7))
    converter = ModelConverter(select="all")
    fused = converter.convert_model(model, input_shape=(2, 7))
    assert bool(converter.conversion_stats["total_replaced"]) != masked  # counts are those of the example
    assert converter.conversion_stats["given_back"] is None
    kfconvert.save(fused, tmp_path / "saved")
    for each in (fused, kfconvert.load(tmp_path / "saved", model=copy.deepcopy(model))):
        forward = guarded_forward(each)
        assert len(forward.variants) == 1 and len(forward.regions) == 2
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            for arguments in ({}, {"attention_mask": torch.ones_like(ids)}):
                torch.testing.assert_close(each(ids, **arguments), model(ids, **arguments))
        assert guard(each) == {"hits": 1, "misses": {NOTHING_FUSED: 1}}
        with torch.no_grad(), pytest.warns(RuntimeWarning, match="the call has other arguments than|int32"):
            each(ids.int(), **({"attention_mask": torch.ones_like(ids)} if masked else {}))


@pytest.mark.parametrize(("name", "ratio", "stays"), [("pooling", 0.5, True), ("mlp", 0.5, True), ("mlp", 0.99, False)])
def test_a_program_stays_whose_replays_are_faster(name, ratio, stays, recordable, monkeypatch, tmp_path):
    with_times(monkeypatch, ratio)
    model, fused, converter = made(name, select="all", filter_fn=lambda module, name: False)
    if not stays:
        return assert_given_back(name, model, fused)
    stats = converter.conversion_stats
    assert stats["given_back"] is None and stats["replays_unfused"] and stats["speedup_achieved"] == 2.0
    assert "calls are replayed from CUDA graphs: " in " ".join(str(stats).split())
    kfconvert.save(fused, tmp_path / "saved")
    for each in (fused, kfconvert.load(tmp_path / "saved", model=copy.deepcopy(model))):
        with torch.no_grad():
            torch.testing.assert_close(each(MODELS[name][1]), model(MODELS[name][1]))
        assert guard(each) == {"hits": 1, "misses": {}} and each.kfconvert_info()["cuda_graphs"]["enabled"]
    monkeypatch.setattr(replay, "can_record", lambda device: False)
    loaded = kfconvert.load(tmp_path / "saved", model=copy.deepcopy(model))
    assert guarded_forward(loaded) is None and loaded.kfconvert_info()["given_back"]


@pytest.mark.cuda
def test_small_operators_without_fusions_are_replayed():
    model = nn.Sequential(*(nn.Softplus() for _ in range(30)), nn.Linear(8, 8)).cuda().eval()
    x = torch.randn(1, 8, device="cuda")
    converter = ModelConverter(filter_fn=lambda module, name: False)
    fused = converter.convert_model(model, example_inputs=x)
    stats = converter.conversion_stats
    assert stats["total_replaced"] == 0 and stats["given_back"] is None and stats["speedup_achieved"] > 1.02
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    assert fused.kfconvert_info()["cuda_graphs"]["replayed"] == 1
