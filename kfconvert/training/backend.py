"""The backend "kfconvert" of torch.compile: Dynamo captures, passes of kfconvert rewrite, TorchInductor compiles."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._dynamo.backends import registry

from ..fallbacks import register_fallbacks
from .constant_masks import simplify_masks
from .head_loss import fuse_heads


def compile_graph(module: fx.GraphModule, inputs: list[Any], records: bool = True) -> Any:
    """Compiles a graph of Dynamo. Passes rewrite it if it needs gradients; an error in a pass is a warning.

    Args:
        records: whether to record CUDA graphs where they save time.
    """
    from torch._inductor import compile_fx

    from . import recorded

    heads = 0
    if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        try:
            simplify_masks(module.graph)
            heads = fuse_heads(module.graph)
        except Exception as error:
            warnings.warn(f"kfconvert: a graph is compiled without fusions: {error!r}", RuntimeWarning)
        module.recompile()
    register_fallbacks()
    # Backward must not write to saved tensors: it runs twice with retain_graph=True. Without logits, activations are
    # the peak of memory: more of them are computed again (LLaMA 1.1B: 0.7 of the peak in 1.005 of the time).
    options = {"donated_buffer": False}
    if heads and not _has_pixels_without_layout(module.graph):
        options["ban_recompute_materialized_backward"] = False
    with torch._functorch.config.patch(options):
        records = records and recorded.is_recordable(inputs)
        compiled = (recorded.compile_recorded if records else compile_fx.compile_fx)(module, inputs)
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []  # the check at run time takes None for some
    return compiled


def _has_pixels_without_layout(graph: fx.Graph) -> bool:
    """Whether a convolution gives or takes images of one pixel, whose strides do not tell channels-last from
    contiguous. If TorchInductor computes such an input again, the gradient of the weight has unexpected strides."""
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "").startswith("conv"):
            values = [each.meta.get("example_value") for each in (node, *node.all_input_nodes[:1])]
            if any(isinstance(value, Tensor) and all(size == 1 for size in value.shape[2:]) for value in values):
                return True
    return False


def register() -> None:
    """Registers the backend by name, for packages that are not installed and so have no entry point."""
    if "kfconvert" not in registry._COMPILER_FNS:
        registry.register_backend(compile_graph, name="kfconvert")
