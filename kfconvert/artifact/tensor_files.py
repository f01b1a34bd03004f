"""Reads and writes safetensors files. Several threads copy tensors to the CPU and write them.

The library's ``save_file`` needs copies of all tensors on the CPU, and writes them in one thread.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes
from torch import Tensor, nn

from ..torch_state import is_dense

_METADATA = {"format": "pt"}
_ALIGNMENT = 8  # bytes
_MOST_THREADS = 4


@functools.cache
def kind_of(dtype: torch.dtype) -> tuple[str, int]:
    """Returns the name of ``dtype`` in a file, and the number of values in an element of a tensor.

    Raises:
        KeyError: a file cannot contain it.
    """
    content = as_bytes({"": torch.empty(1, dtype=dtype, device="cpu")})
    found = _header_in(content)[""]
    return found["dtype"], found["shape"][0]


def unstorable(value: Any) -> str | None:
    """Returns why a file cannot contain ``value``; None if it can."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}; only tensors can be stored safely"
    if type(value) not in (Tensor, nn.Parameter):
        return f"is a {type(value).__name__}, not a plain tensor: it cannot be stored"
    if value.is_meta or not is_dense(value):
        return "is sparse, quantized, nested or without data: it cannot be stored"
    try:
        kind_of(value.dtype)
    except KeyError:
        return f"has the dtype {value.dtype}, which cannot be stored"
    return None


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors in ``file`` and its metadata."""
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata() or {}
    return load_file(file), metadata


def write_tensors(tensors: dict[str, Tensor], file: Path, metadata: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes dense ``tensors`` to ``file``. It contains a tensor under two names twice, as strict loading needs both.

    Raises:
        OSError: the file cannot be written.
    """
    # Larger elements first, so that each tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {**metadata, **_METADATA}}
    starts, end = dict[str, int](), 0
    for name in order:
        tensor, (dtype, count) = tensors[name], kind_of(tensors[name].dtype)
        starts[name], end = end, end + tensor.numel() * tensor.itemsize
        shape = [*tensor.shape[:-1], tensor.shape[-1] * count] if tensor.dim() else []
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    file.write_bytes(head)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        written = [threads.submit(_write, tensors[name], file, len(head) + starts[name]) for name in order]
        for each in written:
            each.result()


def _write(tensor: Tensor, file: Path, start: int) -> None:
    """Writes the bytes of ``tensor`` from ``start`` on."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    left = flat.view(torch.uint8).numpy().data
    with open(file, "r+b", buffering=0) as stream:
        stream.seek(start)
        while left:
            left = left[stream.write(left) :]


def _header_in(content: bytes) -> dict[str, Any]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])
