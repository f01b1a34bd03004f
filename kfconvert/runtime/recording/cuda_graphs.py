"""Decides which calls of a model's programs are recorded as CUDA graphs, and for how long."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ...accuracy import are_close
from ...process import is_cudnn_attention_enabled, switched_off
from .driver_graph import has_driver
from .program import Plans, Program
from .recording import Pool, Recording, Unrecordable
from .split import Call

MOST_RECORDINGS = 16
# A kind of call is recorded at its second call, as a single call would only become slower.
CALLS_BEFORE = 2
# Without room left, a kind of call replaces the least used recording once it has occurred so many times as often, and
# so many calls more. Lengths in random order occur equally often, and would otherwise be recorded all the time.
TIMES_AS_OFTEN, TIMES_MORE = 2, 8
# After so many calls without a recording, all counts are halved, so that formerly frequent kinds give way.
HALVED_AFTER = 1024
# At most so many kinds of calls are counted for a program, as the number of text lengths is unbounded.
MOST_COUNTED = 1024
# After so many refused kinds of calls and no recording, a program is not tried again.
MOST_REFUSALS = 3
# Errors of a replay relative to the largest value: libraries add atomically in varying order, while an incorrect
# recording differs grossly.
_TOLERANCES = dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), 1e-2)

# One recording at a time in a process.
_one = threading.Lock()


def can_record(device: torch.device) -> bool:
    """Whether calls on ``device`` can be recorded at all."""
    return device.type == "cuda" and has_driver()


class _Calls:
    """The calls of one set of plans, by kind."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.counts: Counter[Any] = Counter()
        self.recordings: dict[Any, Recording] = {}
        self.refused: set[Any] = set()
        self.unrecorded = 0
        # The input kinds of the last replayed call, and its recording.
        self.last: tuple[list[Any], Recording] | None = None


class Ahead(NamedTuple):
    """A replay that was launched before the guard confirmed it."""

    recording: Recording
    outputs: tuple[Any, ...]


class CudaGraphs:
    """Runs the programs of a model, from a recording where there is one. A call that cannot be recorded runs without
    one and is counted by reason; the first reason causes a warning.

    A recording belongs to its plans, and is dropped with them when a weight is written or replaced.

    Args:
        model_name: the name for the warning.
        most: the maximum number of recordings for each program, one for each combination of input sizes.
        static_outputs: whether the model returns the recording's own outputs, which its next replay overwrites.
    """

    def __init__(self, model_name: str, most: int = MOST_RECORDINGS, static_outputs: bool = False):
        self.model_name, self.most, self.static_outputs = model_name, most, static_outputs
        self.enabled = False
        self._pools: dict[torch.device, Pool] = {}
        self._calls: WeakSet[_Calls] = WeakSet()
        self.refused: Counter[str] = Counter()
        self.reset_counters()

    def launch_ahead(self, program: Program, leaves: list[Any]) -> Ahead | None:
        """Replay the recording of the last call like this one before ``run`` confirms it: the device computes in the
        meantime, and ``run`` takes the outputs. A replay of the wrong recording is harmless. It writes nothing that
        anybody reads, and what could fail on the device, such as an embedding lookup by the inputs, reads tensors that
        were checked before. The guard must have admitted ``leaves``."""
        plans = program.latest_plans() if self.enabled else None
        calls: _Calls | None = None if plans is None else plans.recordings
        if calls is None or calls.last is None or torch.cuda.is_current_stream_capturing():
            return None
        kinds, recording = calls.last
        try:
            if kinds != _kinds(leaves) or not recording.reads(program.read_by_code()):
                return None
            return Ahead(recording, recording.replay(leaves))
        except Exception:  # a weight was removed, or replaced by one of another kind
            return None

    def run(self, program: Program, leaves: list[Any], is_part: bool, ahead: Ahead | None = None) -> tuple[Any, ...]:
        """Return the flat outputs of ``program`` for the flat inputs ``leaves``; raises as ``Program.run``.

        Args:
            program: draws no random numbers.
            is_part: whether the model's code receives the outputs, and may run the part again and use both results.
            ahead: the result of ``launch_ahead`` for the same call.
        """
        device = _device(leaves) if self.enabled else None
        if device is None or torch.cuda.is_current_stream_capturing():
            return program.run(leaves)
        plans = program.plans(leaves)
        calls = plans.recordings
        if calls is None:
            calls = plans.recordings = _Calls()
            self._calls.add(calls)
        kinds = _kinds(leaves)
        key = _kind_of_call(kinds)
        recording = calls.recordings.get(key)
        if recording is not None and not recording.is_current():
            del calls.recordings[key]
            calls.last = recording = None
        if recording is not None:
            calls.last = kinds, recording
            recording.calls += 1
            self.replays += 1
            return ahead.outputs if ahead is not None and ahead.recording is recording else recording.replay(leaves)
        self.launched += 1
        outputs = program.computed(plans, leaves)
        if self._is_wanted(calls, key) and _one.acquire(blocking=False):
            try:
                self._record(program, plans, key, leaves, outputs, device, self.static_outputs and not is_part)
            finally:
                _one.release()
        return outputs

    def info(self) -> dict[str, Any]:
        """``enabled``, ``max_recordings`` and ``static_outputs`` as set; the number of ``recordings``, their
        ``bytes``, and how many of them have ``generated`` kernels; how many calls since the conversion were
        ``replayed``, and how many were ``launched`` kernel by kernel;
        ``refused``: the number of calls that could not be recorded, by reason, also in the conversion."""
        recordings = [recording for calls in list(self._calls) for recording in list(calls.recordings.values())]
        return {
            "enabled": self.enabled,
            "max_recordings": self.most,
            "static_outputs": self.static_outputs,
            "recordings": len(recordings),
            "bytes": sum(recording.bytes for recording in recordings),
            "generated": sum(recording.is_generated for recording in recordings),
            "replayed": self.replays,
            "launched": self.launched,
            "refused": dict(self.refused),
        }

    def reset_counters(self) -> None:
        self.replays = self.launched = 0

    def clear(self) -> None:
        for calls in list(self._calls):
            calls.clear()

    @contextmanager
    def for_now(self) -> Iterator[None]:
        """Context manager that drops the recordings made in it, and restores the recordings that they replaced."""
        before = {calls: dict(calls.recordings) for calls in list(self._calls)}
        try:
            yield
        finally:
            for calls in list(self._calls):
                calls.clear()
                calls.recordings.update(before.get(calls, {}))

    def _is_wanted(self, calls: _Calls, key: Any) -> bool:
        if switched_off() or key in calls.refused or (len(calls.refused) >= MOST_REFUSALS and not calls.recordings):
            return False
        counts = calls.counts
        if len(counts) >= MOST_COUNTED:
            counts.clear()
        calls.unrecorded += 1
        if calls.unrecorded >= HALVED_AFTER:
            calls.unrecorded = 0
            for kind in counts:
                counts[kind] //= 2
            for recording in calls.recordings.values():
                recording.calls //= 2
        counts[key] += 1
        if counts[key] < CALLS_BEFORE or not self.most:
            return False
        if len(calls.recordings) < self.most:
            return True
        least = min(recording.calls for recording in calls.recordings.values())
        return counts[key] > TIMES_AS_OFTEN * least + TIMES_MORE

    def _record(
        self,
        program: Program,
        plans: Plans,
        key: Any,
        leaves: list[Any],
        outputs: tuple[Any, ...],
        device: torch.device,
        static: bool,
    ) -> None:
        calls: _Calls = plans.recordings
        if len(calls.recordings) >= self.most:
            least = min(calls.recordings, key=lambda kind: calls.recordings[kind].calls)
            del calls.recordings[least]
            calls.last = None
        pool = Pool(device) if static else self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = Pool(device)
        try:
            call = program.generated_call(plans, key, leaves)
            recording = None if call is None else _generated_recording(call, program, leaves, pool, static)
            recording = recording or _recording(program.call(plans, outputs), program, leaves, outputs, pool, static)
        except Unrecordable as reason:
            calls.refused.add(key)
            self._refuse(str(reason))
        except torch.OutOfMemoryError:
            self.clear()
            self._pools.clear()
            self.most = 0
            self._refuse("there is not enough memory for a CUDA graph")
        else:
            if not switched_off():  # else a trace in another thread may have switched libraries
                recording.calls = calls.counts.pop(key, 0)
                calls.recordings[key] = recording

    def _refuse(self, reason: str) -> None:
        if not self.refused:
            warnings.warn(
                f"kfconvert: {self.model_name} runs without a CUDA graph for this call: {reason}. Further calls are "
                "counted in model.kfconvert_info().",
                RuntimeWarning,
                stacklevel=8,
            )
        self.refused[reason] += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaGraphs:
        duplicate = CudaGraphs(self.model_name, self.most, self.static_outputs)
        duplicate.enabled = self.enabled
        return duplicate

    def __reduce__(self):
        return CudaGraphs, (self.model_name, self.most, self.static_outputs)


def _recording(
    call: Call, program: Program, leaves: list[Any], outputs: tuple[Any, ...], pool: Pool, static: bool
) -> Recording:
    """Return the recording of ``call``. Raises Unrecordable, also where a replay differs from ``outputs``."""
    recording = Recording(call, leaves, program.read_by_code(), pool, static)
    if not are_close(outputs, recording.replay(leaves), _TOLERANCES):
        raise Unrecordable("a replay's outputs differ from the recorded call's")
    return recording


def _generated_recording(call: Call, program: Program, leaves: list[Any], pool: Pool, static: bool) -> Recording | None:
    """Return the recording of generated kernels; None where they cannot be recorded. A replay is compared with a call
    of them: the rounding of the program differs, and the conversion judged their accuracy."""
    try:
        recording = _recording(call, program, leaves, tuple(call(leaves)), pool, static)
    except Unrecordable:
        return None
    recording.is_generated = True
    return recording


def _device(leaves: list[Any]) -> torch.device | None:
    """The GPU that holds all tensors among ``leaves``, None where there is none."""
    found = None
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not leaf.is_cuda or (found is not None and leaf.device != found):
                return None
            found = leaf.device
    return found


def _kinds(leaves: list[Any]) -> list[Any]:
    """The properties of each input that a recording depends on; the guard of the program checks all others."""
    return [
        (leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()) if isinstance(leaf, Tensor) else None
        for leaf in leaves
    ]


def kind_of_call(leaves: list[Any]) -> tuple[Any, ...]:
    """The properties of a call with these flat inputs that its recording and its generated kernels depend on."""
    return _kind_of_call(_kinds(leaves))


def _kind_of_call(kinds: list[Any]) -> tuple[Any, ...]:
    return (library_switches(), *kinds)


def library_switches() -> tuple[Any, ...]:
    """The process settings by which PyTorch and its libraries choose kernels."""
    return tuple([switch() for switch in _SWITCHES])


_precision = torch._C._get_fp32_precision_getter
_SWITCHES = (
    lambda: _precision("cuda", "matmul"),
    lambda: _precision("cuda", "conv"),
    lambda: _precision("generic", "all"),
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_fill_uninitialized_memory,
    torch._C._get_blas_preferred_backend,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_cublas_allow_fp16_accumulation,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    is_cudnn_attention_enabled,
)
