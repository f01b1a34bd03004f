"""Models of libraries whose code is known: what a short run shows of them holds for other calls, too."""

from __future__ import annotations

from torch import nn

# Their versions identify the code and its constants.
LIBRARIES = ("torch", "torchvision", "transformers", "timm", "diffusers")


def is_of_libraries(model: nn.Module) -> bool:
    """Whether all modules of ``model`` are of classes of ``LIBRARIES``."""
    return all(type(module).__module__.partition(".")[0] in LIBRARIES for module in model.modules())
