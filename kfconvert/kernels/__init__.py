"""The implementations of the operators one by one; ``kfconvert.ops`` picks the fastest for a device.

``cpu``, ``cuda``   the compiled kernels of that device, never plain ATen, with the operators' backward passes
``triton``          Triton kernels, forward only; needs the package triton
``reference``       the definitions in plain ATen

``kernels.<family>.<name>`` has the signature and the meaning of ``kfconvert.ops.<name>``; no family has all
names, ``kernels.<family>.__all__`` are those that it has. Each is imported at its first use.

Beside them, as second names, functions of ``kfconvert.ops`` itself: ``kernels.fused_gelu_dropout`` and others, and
by group ``kernels.elementwise``, ``kernels.fusion`` and ``kernels.reduction``.
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
