"""Fallbacks of TorchInductor for the operators of kfconvert."""

import torch
from torch.torch_version import TorchVersion

_NAMESPACE = "kfconvert::"


def register_fallbacks() -> None:
    """Registers the operators in TorchInductor, which calls them as they are.

    TorchInductor registers an operator at its first call anyway. Before torch 2.13, it then formats all arguments for
    a line of its log, which takes time exponential in the depth of the graph.
    """
    if TorchVersion(torch.__version__) >= "2.13":
        return
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    names = torch._C._dispatch_get_all_op_names()
    for name in (each.removeprefix(_NAMESPACE) for each in names if each.startswith(_NAMESPACE)):
        # A compiled library may have kernels of operators that are not defined yet.
        packet = getattr(torch.ops.kfconvert, name, None)
        if packet is not None and packet.default not in lowering.lowerings:
            constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(packet.default))
            lowering.make_fallback(packet.default, layout_constraint=constraint)
