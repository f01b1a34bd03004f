import pytest
import torch
from torch._inductor import compile_fx

from kfconvert.training import head_loss, linear_cross_entropy


@pytest.fixture
def heads(monkeypatch):
    """The number of fused heads in each compiled graph, which AOTAutograd runs; TorchInductor would compile C++."""
    found, operator = [], linear_cross_entropy.OPERATOR

    def run_uncompiled(module, inputs, **_):
        found.append(sum(node.target is operator for node in module.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(compile_fx, "compile_fx", run_uncompiled)
    monkeypatch.setattr(head_loss, "SMALLEST_LOGITS", 0)
    monkeypatch.setattr(linear_cross_entropy, "BLOCK_BYTES", 0)
    monkeypatch.setattr(linear_cross_entropy, "ROWS", 70)
    return found
