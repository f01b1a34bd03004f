"""The compiled checks of each call of a converted model, from ``csrc/watch.h`` and ``csrc/fingerprint.h``."""

try:
    from ._C import fingerprint, first_change, gather, has_state, tensor_key, tensor_state, watch_state
except ImportError as error:
    raise ImportError(
        "kfconvert._C was not built for this Python, and converted models need it. Install a C++ compiler, ninja and "
        "pybind11, then reinstall kfconvert; `kfconvert doctor` lists what is missing"
    ) from error

__all__ = ["fingerprint", "first_change", "gather", "has_state", "tensor_key", "tensor_state", "watch_state"]
