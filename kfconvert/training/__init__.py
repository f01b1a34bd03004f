"""Training of converted models: a backend of torch.compile, its graph passes, and their operators."""

from .backend import register
from .compiled_forward import CompiledForward

register()
