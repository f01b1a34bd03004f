"""Models that somebody has compiled or quantized already are refused, or left as they are, in one clear line."""

import pytest
import torch
from torch import nn

import kfconvert
from kfconvert import ConversionError, ModelConverter

X = torch.randn(4, 16)


def net():
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Sequential(nn.Linear(16, 16), nn.ReLU())).eval()


def compiled_in_place(module):
    module.compile(backend="eager")


def with_a_compiled_forward(module):
    module.forward = torch.compile(module.forward, backend="eager")


@pytest.mark.parametrize("compile_", [compiled_in_place, with_a_compiled_forward])
@pytest.mark.parametrize(("path", "name"), [("", "the model"), ("2", "2")])
def test_what_was_compiled_is_refused(compile_, path, name):
    model = net()
    compile_(model.get_submodule(path))
    with pytest.raises(ConversionError, match=f"^{name} is compiled with torch.compile: convert the model first"):
        ModelConverter().convert_model(model, example_inputs=X)


def test_what_a_compiler_wraps_is_refused():
    with pytest.raises(ConversionError, match="the model is compiled with torch.compile"):
        ModelConverter().convert_model(torch.compile(net(), backend="eager"), example_inputs=X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize_per_tensor")
def test_weights_that_were_packed_are_told(tmp_path):
    model = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear})
    converter = ModelConverter()
    with pytest.warns(UserWarning, match="it has packed quantized weights"):
        fused = converter.convert_model(model, example_inputs=X)
    assert torch.equal(fused(X), model(X))
    with pytest.raises(kfconvert.ArtifactError, match="only tensors can be stored safely"):
        kfconvert.save(fused, tmp_path)
