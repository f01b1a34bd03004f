"""The files of an artifact, and the schema of ``kfconvert.json``: the values that ``load`` depends on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..conversion import ConversionConfig

FORMAT = 4
WEIGHTS_FILE = "model.safetensors"
# The file name in ``save_pretrained`` of diffusers.
DIFFUSION_WEIGHTS_FILE = f"diffusion_pytorch_{WEIGHTS_FILE}"
# The file names of a sharded model in ``save_pretrained``.
_SHARD = re.compile(r"(?:diffusion_pytorch_)?model-\d{5}-of-\d{5}\.safetensors")
BUFFERS_FILE = "buffers.safetensors"  # buffers outside of the state dict, if any
RECORD_FILE = "kfconvert.json"
GRAPHS_FILE = "graphs.json"  # the traced graphs, if they can be stored
REPORT_FILE = "report.html"


def weights_files(names: Iterable[str]) -> list[str]:
    """Returns the files of a folder that contain the state dict: the single file, or its shards."""
    found = set(names)
    whole = [name for name in (WEIGHTS_FILE, DIFFUSION_WEIGHTS_FILE) if name in found]
    return whole[:1] or sorted(filter(_SHARD.fullmatch, found)) or [WEIGHTS_FILE]


class _Part(BaseModel):
    """A part of the record; types are checked, and further fields kept."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Site(_Part):
    pattern: str
    module: str
    region: str = ""
    status: Literal["found", "applied", "rejected"]
    reason: str | None
    strategy: str | None
    original_us: float | None
    fused_us: float | None


class _OwnPattern(_Part):
    name: str
    reference: str | None
    replacement: str | None
    when: str | None
    conditional: bool
    numerics: Literal["exact", "reassociated"] | float
    example: Any


class _CudaGraphs(_Part):
    enabled: bool = False
    max_recordings: int = Field(0, ge=0)
    static_outputs: bool = False


class _Generated(_Part):
    kernels: Literal["all", "rest"]
    leaves: Any = None


class _Statistics(_Part):
    """``conversion_stats``: what ``load`` depends on. Reports show the rest."""

    sites: list[_Site] = []
    form_sites: list[list[_Site]] = []
    part_sites: list[_Site] = []
    own_patterns: list[_OwnPattern] = []
    check_weights: int | None = Field(None, ge=0)
    cuda_graphs: _CudaGraphs | None = None
    generates: bool = False
    generated: list[_Generated] = []
    config: ConversionConfig | None = None
    example: Any = None
    layout: Literal["channels_last", "contiguous"] = "contiguous"
    replays_unfused: bool = True


class _Submodules(_Part):
    modules: list[str] = Field(min_length=1)
    call: dict[str, Any]
    free: dict[str, list[list[int]]]  # the argument and the dimension of each free size


class Record(_Part):
    format: Literal[4]
    model: str
    device: str
    recipe: dict[str, Any] | None
    calls: list[dict[str, Any]]
    parts: list[_Submodules]
    statistics: _Statistics
    state_metadata: dict[str, dict[str, Any]]
    quantized: dict[str, list[str]] = {}  # the attributes with tuples of each quantized weight
    files: dict[str, str]  # the checksum of each other file
    checksum: str


class _Result(_Part):
    name: str
    statistics: _Statistics | None


class Results(_Part):
    """The output of ``kfconvert --json``."""

    models: list[_Result]
