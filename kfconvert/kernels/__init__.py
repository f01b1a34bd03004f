"""The implementations of the operators one by one; ``kfconvert.ops`` picks the fastest for a device.

``cpu``, ``cuda``   the compiled kernels of that device, never plain ATen, with the operators' backward passes
``triton``          Triton kernels, forward only; needs the package triton
``reference``       the definitions in plain ATen

``kernels.<family>.<name>`` has the signature and the meaning of ``kfconvert.ops.<name>``; no family has all
names, ``kernels.<family>.__all__`` are those that it has. Each is imported at its first use.
"""

import importlib

__all__ = ["cpu", "cuda", "reference", "triton"]


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
