"""Just-in-time compilation of user CUDA sources: ``kfconvert.get_cuda_compiler()``."""

from .compiler import CudaCompiler, get_cuda_compiler
from .errors import CompileError

__all__ = ["CompileError", "CudaCompiler", "get_cuda_compiler"]
