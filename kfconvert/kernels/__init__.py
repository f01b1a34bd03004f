"""The operators by implementation. ``kfconvert.ops`` selects the fastest for a device.

``cpu``, ``cuda``   the compiled kernels of that device, never plain ATen, with the operators' backward passes
``triton``          Triton kernels, forward only; needs the package triton
``reference``       the definitions in plain ATen

``kernels.<family>.<name>`` has the signature and semantics of ``kfconvert.ops.<name>``. No family has all operators;
``kernels.<family>.__all__`` lists its names. Families are imported on first use.

The package also has aliases of functions of ``kfconvert.ops``: ``kernels.fused_gelu_dropout`` and others, and the
groups ``kernels.elementwise``, ``kernels.fusion`` and ``kernels.reduction``.
"""

import importlib

from .. import second_names

FAMILIES = ("cpu", "cuda", "reference", "triton")
GROUPS = ("elementwise", "fusion", "reduction")

__all__ = [*FAMILIES, *GROUPS, *second_names.TABLE[__name__]]


def __getattr__(name: str):
    if name in FAMILIES or name in GROUPS:
        return importlib.import_module(f".{name}", __name__)
    if name in second_names.TABLE[__name__]:
        return second_names.found(second_names.TABLE[__name__][name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
