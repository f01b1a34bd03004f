"""The examples that the fused modules declare."""

import inspect

import torch
from torch import nn

from kfconvert import modules
from kfconvert.modules import FusedModule

CLASSES = [
    value
    for name in modules.__all__
    if inspect.isclass(value := getattr(modules, name)) and issubclass(value, FusedModule) and value is not FusedModule
]
# All examples by name, and those of classes that are not named after an activation.
EXAMPLES = {f"{cls.__name__}-{index}": (cls, index) for cls in CLASSES for index, _ in enumerate(cls.examples())}
MAIN = [name for name, (cls, _) in EXAMPLES.items() if getattr(cls, "default_activation", "none") == "none"]


def example(name, device="cpu", dtype=torch.float32):
    """(module, inputs) of an example, with parameters and statistics as different from defaults as trained ones."""
    cls, index = EXAMPLES[name]
    module, inputs = list(cls.examples())[index]
    with torch.no_grad():
        for store, key in module.held_places():
            if (tensor := store[key]) is not None and tensor.is_floating_point() and tensor.dim() == 1:
                tensor.uniform_(0.5, 1.5)
    return module.to(device, dtype), tuple(
        x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in inputs
    )


def replace_tensors(module, change):
    """Puts ``change(tensor)`` in the place of each floating-point parameter and buffer."""
    for store, key in module.held_places():
        tensor = store[key]
        if tensor is not None and tensor.is_floating_point():
            changed = change(tensor.detach())
            store[key] = nn.Parameter(changed, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else changed
