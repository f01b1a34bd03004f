"""The schema of ``kfconvert.json``, so that readers find only the expected types and lengths."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..conversion import ConversionConfig

FORMAT = 3
_Readable = Literal[1, 2, 3]  # 1 has no parts, 2 no checksums
READABLE_FORMATS = get_args(_Readable)
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
    return whole[:1] or sorted(filter(_SHARD.fullmatch, found))


class _Part(BaseModel):
    """A part of the record; types are checked, and fields of later versions kept."""

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

    @model_validator(mode="after")
    def _has_strategy(self) -> _Site:
        if self.status == "applied" and self.strategy is None:
            raise ValueError("an applied site has a strategy")
        return self


class _Region(_Part):
    name: str
    module: str = ""
    captured: bool
    reason: str | None = None
    location: str | None = None


class _NearMiss(_Part):
    pattern: str
    module: str
    reason: str
    location: str | None = None


class _Error(_Part):
    """The distance of an output from its reference; a non-finite number is None."""

    leaf: str = ""
    scale: float | None = None
    max_rel: float | None
    mean_rel: float | None = None


class _Output(_Part):
    original_error: _Error
    optimized_error: _Error


class _Activation(_Part):
    operator: str
    source: str | None
    module: str
    location: str | None = None


class _Accuracy(_Part):
    passed: bool | None
    reason: str | None
    reference: str | None = None
    original_error: _Error | None = None
    optimized_error: _Error | None = None
    ratio: float | None = None
    accuracy_threshold: float | None = None
    differing: int = Field(0, ge=0)
    outputs: list[_Output] = Field([], max_length=1000)


class _Timing(_Part):
    median_ms: float
    q1_ms: float
    q3_ms: float
    rounds: int | None = Field(None, ge=0)


class _Speedup(_Part):
    ratio: float | None
    low: float | None
    high: float | None
    measurable: bool


class _Timings(_Part):
    baseline: str
    timings: dict[str, _Timing]
    speedups: dict[str, _Speedup]


class _Generated(_Part):
    tokens_per_s: float
    prefill_ms: float
    step_ms: float | None


class _Generation(_Part):
    prompt: list[int]
    new_tokens: int
    speedup: _Speedup
    original: _Generated
    converted: _Generated


class _Tuned(_Part):
    inputs: str
    weight: float
    timings: _Timings | None


class _TimeShares(_Part):
    milliseconds: float
    fused: float
    modules: dict[str, float]


class _CudaGraphs(_Part):
    enabled: bool = False
    max_recordings: int = Field(0, ge=0)
    recordings: int = Field(0, ge=0)
    bytes: int = 0
    refused: dict[str, int] = {}


_Bytes = Annotated[int, Field(gt=-(2**63), lt=2**63)]


class _Peak(_Part):
    original: _Bytes | None
    converted: _Bytes | None


class _Memory(_Part):
    weights: _Bytes
    derived: _Bytes | None
    recordings: _Bytes
    peak: _Peak


class _OwnPattern(_Part):
    name: str = Field(max_length=1000)
    reference: str | None = Field(max_length=1000)
    replacement: str | None = Field(max_length=1000)
    when: str | None = Field(max_length=1000)
    conditional: bool
    numerics: Literal["exact", "reassociated"] | Annotated[float, Field(ge=0)]
    example: Any


class _Served(_Part):
    """The results of programs for one example call."""

    method: str | None
    inputs: str
    hits: dict[str, int]
    misses: dict[str, int]


class _Method(_Part):
    """A public method that runs modules of the model."""

    name: str
    modules: list[str]
    fused: list[str]
    timings: _Timings | None = None


class _Statistics(_Part):
    """``conversion_stats``."""

    total_found: int = 0
    total_replaced: int = 0
    sites: list[_Site] = []
    form_sites: list[list[_Site]] = []
    part_sites: list[_Site] = []
    near_misses: list[_NearMiss] = []
    unmatched_activations: list[_Activation] = []
    own_patterns: list[_OwnPattern] = Field(default=[], max_length=1000)
    regions: list[_Region] = []
    accuracy: _Accuracy | None = None
    timings: _Timings | None = None
    generation: _Generation | None = None
    tuned_for: list[_Tuned] | None = Field(None, max_length=10_000)
    time_shares: _TimeShares | None = None
    speedup_achieved: float | None = None
    seconds: dict[str, float] = {}
    check_weights: int | None = Field(None, ge=0)
    cuda_graphs: _CudaGraphs | None = None
    memory: _Memory | None = None
    not_written: list[str] | None = None
    parts_left_out: int | None = None
    served: list[_Served] = []
    methods: list[_Method] = []
    asked: list[str] = []
    generates: bool = False
    environment: dict[str, Any] = {}
    config: ConversionConfig | None = None
    model: str = ""
    inputs: str = ""
    example: Any = None
    layout: Literal["channels_last", "contiguous"] = "contiguous"
    reverted: str | None = None
    nothing_fused: str | None = None
    given_back: str | None = None
    replays_unfused: bool = True  # earlier versions always served calls with such programs


Place = list[int]  # the index of an argument and a dimension, as two numbers


class _Submodules(_Part):
    modules: list[str] = Field(min_length=1, max_length=100_000)
    call: dict[str, Any]
    free: dict[str, list[Place]]

    @model_validator(mode="after")
    def _places_are_pairs(self) -> _Submodules:
        if any(len(place) != 2 or min(place) < 0 for dimensions in self.free.values() for place in dimensions):
            raise ValueError("the place of a free size is an argument and a dimension")
        return self


class _File(_Part):
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Record(_Part):
    format: _Readable
    model: str
    device: str = Field(max_length=100)
    recipe: dict[str, Any] | None
    calls: list[dict[str, Any]] = Field(max_length=1000)
    parts: list[_Submodules] = Field(default=[], max_length=100_000)
    statistics: _Statistics
    state_metadata: dict[str, dict[str, Any]] | None = None
    files: dict[str, _File] = {}
    checksum: str = ""

    @model_validator(mode="after")
    def _has_checksums(self) -> Record:
        if self.format >= 3 and not (weights_files(self.files) and self.checksum):
            raise ValueError("it has no checksums")
        return self


class _Result(_Part):
    name: str
    error: str | None = None
    statistics: _Statistics | None


class Results(_Part):
    """The output of ``kfconvert --json``."""

    models: list[_Result] = Field(max_length=100_000)


class _Size(_Part):
    hint: int = Field(ge=1, lt=2**31)
    lower: int = Field(ge=0, lt=2**62)
    upper: int | None = Field(ge=0, lt=2**62)


class _Constant(_Part):
    dtype: str
    device: str = "cpu"
    shape: list[int] = Field(max_length=100)
    elements: list[Any] = Field(max_length=1000)


class _Value(_Part):
    """The known facts of a value: for a tensor, shape and strides, each a number or an expression."""

    dtype: str = ""
    device: str = ""
    shape: list[Any] | None = Field(None, max_length=100)
    strides: list[Any] | None = Field(None, max_length=100)

    @model_validator(mode="after")
    def _is_whole(self) -> _Value:
        if (self.shape is None) != (self.strides is None):
            raise ValueError("a tensor has a shape and strides")
        return self


class _Node(_Part):
    """An input of the graph, a call, or the output."""

    name: str = Field(max_length=1000)
    value: int = Field(ge=0)
    calls: str | None = Field(None, max_length=1000)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    storage: int | None = None
    module: str | None = None
    location: str | None = None
    order: list[int] | None = Field(None, max_length=100)


class _TensorGuard(_Part):
    index: int = Field(ge=0)
    dtype: str
    device: str
    sizes: list[Any] = Field(max_length=100)


_Pair = Annotated[list[Any], Field(min_length=2, max_length=2)]
_Index = Annotated[int, Field(ge=0)]


class _Guard(_Part):
    tensors: list[_TensorGuard]
    constants: list[_Pair]
    constraints: list[Any]
    ranges: dict[str, Annotated[list[int | None], Field(min_length=2, max_length=2)]]
    free: dict[str, list[Annotated[list[_Index], Field(min_length=2, max_length=2)]]]
    one_is_safe: list[str] = Field(max_length=10)
    answers: list[Annotated[list[Any], Field(min_length=3, max_length=3)]]
    tried: list[list[_Index]]
    may_be_one: list[list[_Index]]


class StoredRegion(_Part):
    """See ``region.made_region``."""

    sizes: dict[str, _Size] = Field(max_length=1000)
    values: list[_Value]
    nodes: list[_Node]
    inputs: list[str]
    slots: dict[str, Annotated[list[str], Field(min_length=2, max_length=2)]]
    constants: dict[str, _Constant]
    outputs: Any
    caches: list[Annotated[list[Any], Field(min_length=2, max_length=2)]] = Field([], max_length=1000)
    written: list[Any] = Field([], max_length=1000)
    reads: list[str | Annotated[list[str], Field(min_length=3, max_length=3)]]
    lost_gradients: list[str] | None = Field(None, max_length=100_000)
    guard: _Guard
    default_device: str | None


class _StoredForm(_Part):
    """A graph with its example arguments in the format of ``inputs.described``."""

    graph: StoredRegion
    example: dict[str, Any]


class StoredGraphs(_Part):
    """``graphs.json``: the traced graphs of a record's calls and parts, in their order; None for a graph that cannot be
    stored. ``generation``: the graphs of all calls that ``generate`` makes, in their order; None if one of them cannot
    be stored, or none was captured. ``evidence``: see ``runtime.state.evidence``."""

    format: Literal[1]
    device: str = Field(max_length=100)
    evidence: str = Field(pattern="^[0-9a-f]{64}$")
    calls: list[StoredRegion | None] = Field(max_length=1000)
    parts: list[StoredRegion | None] = Field(max_length=100_000)
    generation: list[_StoredForm] | None = Field(None, max_length=1000)
