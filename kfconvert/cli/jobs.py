"""The work of the command line: loads, converts, reports and saves models by name.

Slow imports are inside functions, so errors in names and options are reported first.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .. import zoo
from ..folders import check_writable, expanded, none_left_empty
from ..json_values import json_ready
from . import terminal
from .messages import unexpected
from .ray_tasks import ray_tasks
from .workers import Engine, Lost, Processes, run_tasks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..converter import ModelConverter


@dataclass
class Jobs:
    """One call of the command: one device, dtype, weights and sizes for all models.

    Args:
        device_name, dtype_name: the user's input; ``"auto"`` is CUDA if there is a GPU.
        sizes: ``batch_size``, ``seq_len`` and ``generates`` of ``zoo.resolve``.
        options: options of ``ConversionConfig``.
        save_path: each model is saved in a separate folder below it; None saves nothing.
        tune_for: shapes with weights, see ``ModelConverter.convert_model``; empty for the example inputs.
        input_shape: see ``ModelConverter.convert_model``; None for the model's default inputs.
        skip_existing: whether to skip models with a saved artifact.
        at_once: number of models converted in parallel, each in a separate process; at most one per GPU on CUDA.
        engine: ``"process"`` converts on this machine, ``"ray"`` in one Ray task per model.
        shows_progress: whether to show a progress bar on stderr.
    """

    device_name: str
    dtype_name: str
    weights: str
    sizes: dict[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    save_path: Path | None = None
    tune_for: Sequence[tuple[tuple[int, ...], float]] = ()
    input_shape: tuple[int, ...] | None = None
    skip_existing: bool = False
    at_once: int = 1
    engine: str = "process"
    shows_progress: bool = True

    # Set within ``ready``.
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)
    converter: ModelConverter = field(init=False)

    def run(
        self, names: list[str], tell: Callable[[dict[str, Any]], None], say_error: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """Converts each model. A failure of one does not stop the others.

        Args:
            tell: called with the result of each model.
            say_error: called with one line for each model that failed.

        Returns:
            for each name {"name", "error", "skipped", "saved", "weights", "statistics"}, ready for JSON; ``error``
            is None on success.

        Raises:
            click.ClickException: the device does not exist, or the save path cannot be used.
        """
        targets = self._targets(names)
        finished: dict[str, dict[str, Any]] = {}
        stdout = sys.stdout

        def done(name: str, result: dict[str, Any]) -> None:
            finished[name] = result
            with contextlib.redirect_stdout(stdout):
                tell(result)
            if result["error"]:
                say_error(result["error"])

        with contextlib.ExitStack() as stack:
            if self.save_path is not None:  # a second Ctrl-C may have interrupted the clean-up
                stack.enter_context(none_left_empty(self.save_path))
            stack.enter_context(self.ready(names))
            skipped = self._skipped(targets)
            left = [name for name in names if name not in skipped]
            at_once = min(self._possible_at_once(), len(left))
            here = at_once <= 1 and self.engine == "process"
            for name in names:
                if name in skipped or here:
                    done(name, skipped.get(name) or self._one(name, targets[name]))
            if left and not here:
                self._side_by_side(left, targets, at_once, done)
        return [finished[name] for name in names]

    def explain(self, name: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Converts one model and returns its statistics, ready for JSON, and the class name of each module by path.

        Raises:
            click.ClickException: the model cannot be loaded or converted, or the device does not exist.
        """
        with self.ready([name]), self.failing_in_one_line(name), terminal.progress_bar(name) as progress:
            from ..report import module_classes

            progress("load", 0, 1)
            entry = self.resolved(name)
            converted = self._converted(entry, progress, profile=True)
            return json_ready(self.converter.conversion_stats), module_classes(converted)

    @contextlib.contextmanager
    def ready(self, names: Iterable[str]) -> Iterator[None]:
        """Context manager that resolves device and dtype, checks the options, and keeps library output off stdout.
        Options may name patterns that the code of the models ``names`` registers."""
        with contextlib.redirect_stdout(sys.stderr), terminal.warnings_as_lines():
            from ..converter import ConversionError, ModelConverter

            if self.options.get("include") or self.options.get("exclude"):
                for name in names:
                    zoo.import_code(name)
            try:
                self.converter = ModelConverter(**self.options)
            except ConversionError as error:
                raise click.ClickException(str(error)) from None
            self.device, self.dtype = device_and_dtype(self.device_name, self.dtype_name)
            terminal.quieten_libraries()
            yield

    def _targets(self, names: list[str]) -> Mapping[str, Path | None]:
        """The folder of each model, checked before the conversions start."""
        if self.save_path is None:
            return dict.fromkeys(names)
        targets = {name: self.save_path / folder_name(name) for name in names}
        owners: dict[Path, str] = {}
        for name, target in targets.items():
            if target in owners:
                raise click.ClickException(f"{owners[target]} and {name} would both be saved in {target}")
            owners[target] = name
        try:
            check_writable(self.save_path)
        except OSError as error:
            what = "write to" if os.path.exists(expanded(self.save_path)) else "create the save path"
            why = error.strerror or error
            raise click.ClickException(f"cannot {what} {self.save_path}: {why}") from error
        from .. import artifact

        try:
            for target in targets.values():
                artifact.check_target(target)
        except artifact.ArtifactError as error:
            raise click.ClickException(str(error)) from error
        return targets

    def _skipped(self, targets: Mapping[str, Path | None]) -> dict[str, dict[str, Any]]:
        """The results of models that are skipped because they have an artifact."""
        from ..artifact import RECORD_FILE

        return {
            name: {**_result(name), "skipped": True, "saved": str(target)}
            for name, target in targets.items()
            if self.skip_existing and target is not None and (expanded(target) / RECORD_FILE).exists()
        }

    def _one(self, name: str, target: Path | None) -> dict[str, Any]:
        from .. import artifact

        result = _result(name)
        try:
            with self.failing_in_one_line(name), terminal.progress_bar(name, self.shows_progress) as progress:
                progress("load", 0, 1)
                entry = self.resolved(name)
                result["weights"] = entry.recipe["weights"]
                converted = self._converted(entry, progress)
                result["statistics"] = json_ready(self.converter.conversion_stats)
                if target is not None:
                    progress("save", 0, 1)
                    result["saved"] = str(artifact.save(converted, target, source=entry.recipe))
        except click.ClickException as error:  # the other models continue
            result["error"] = error.message
        return result

    def _possible_at_once(self) -> int:
        """The number of models to convert in parallel: at most one per GPU on CUDA, because models on one GPU distort
        each other's timings. Ray schedules its tasks itself."""
        if self.device.type != "cuda" or self.at_once == 1 or self.engine == "ray":
            return self.at_once
        return min(self.at_once, len(_visible_gpus()) if self.device.index is None else 1)

    def _side_by_side(
        self,
        names: list[str],
        targets: Mapping[str, Path | None],
        at_once: int,
        done: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Converts ``at_once`` models in parallel, each in a separate process with its share of the CPU threads."""
        alone = replace(self, at_once=1, engine="process", shows_progress=False)

        def ended(task: _Task, result: Any) -> None:
            lost = isinstance(result, Lost)
            done(task.name, _result(task.name, f"{task.name}: {result.reason}") if lost else result)

        import torch

        threads, on_gpus = torch.get_num_threads(), self.device.type == "cuda"
        with contextlib.ExitStack() as stack:
            if self.engine == "process":
                engine: Engine = Processes()
                share, gpus = max(1, threads // at_once), _visible_gpus() if on_gpus else []
            elif self.device.index is not None:
                raise click.ClickException(f"Ray chooses the GPU of each model: --device cuda, not {self.device}")
            else:
                engine = tasks_of_ray = stack.enter_context(ray_tasks(at_once, threads, on_gpus))
                share, gpus = tasks_of_ray.threads, []
            run_tasks(engine, _work, [_Task(alone, name, targets[name], share, gpus) for name in names], at_once, ended)

    @contextlib.contextmanager
    def failing_in_one_line(self, name: str) -> Iterator[None]:
        """Context manager that turns any error of a model into a click.ClickException of one line."""
        import torch

        try:
            yield
        except click.ClickException:
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise click.ClickException(f"{name}: out of memory on {self.device}") from error
        except (Exception, SystemExit) as error:
            raise click.ClickException(_one_line(name, error)) from error

    def resolved(self, name: str) -> zoo.ZooModel:
        """Resolves the model ``name`` with the options. Call it within ``ready``."""
        has_inputs = self.input_shape is not None
        return zoo.resolve(name, self.weights, self.dtype, self.device, **self.sizes, has_inputs=has_inputs)

    def _converted(
        self, entry: zoo.ZooModel, progress: Callable[[str, int, int], None], profile: bool = False
    ) -> nn.Module:
        from ..inputs import Weighted

        inputs = {"input_shape": self.input_shape} if self.input_shape else {"example_inputs": entry.example_inputs}
        return self.converter.convert_model(
            entry.model,
            **inputs,
            device=self.device,
            progress=progress,
            tune_for=[Weighted(shape, weight) for shape, weight in self.tune_for] or None,
            profile=profile,
        )


class _Task(NamedTuple):
    """One model for a separate process. The process uses the GPU of its slot in ``gpus``, or all visible GPUs if
    ``gpus`` is empty."""

    jobs: Jobs
    name: str
    target: Path | None
    threads: int
    gpus: list[str]


def _work(task: _Task, slot: int) -> dict[str, Any]:
    if task.gpus:  # the process sees one GPU, so the artifact names cuda:0
        os.environ["CUDA_VISIBLE_DEVICES"] = task.gpus[slot]
    import torch

    torch.set_num_threads(task.threads)
    try:
        with task.jobs.ready([task.name]):
            return task.jobs._one(task.name, task.target)
    except click.ClickException as error:
        return _result(task.name, f"{task.name}: {error.message}")
    except Exception as error:
        return _result(task.name, _one_line(task.name, error))


def _visible_gpus() -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES of the GPUs that PyTorch sees, in PyTorch's order."""
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [name.strip() for name in chosen.split(",")][:count] if chosen else [str(index) for index in range(count)]


def folder_name(name: str) -> str:
    """Returns the folder name of a model: ``google/vit`` -> ``google--vit``, a local folder -> its name."""
    if name.startswith((".", "/", "~")) or os.path.isdir(name):
        name = expanded(name).resolve().name
    return re.sub(r"[^\w.-]+", "--", name).strip(".-") or "model"


def device_and_dtype(device_name: str, dtype_name: str) -> tuple[torch.device, torch.dtype]:
    """Converts names to a device and a dtype. ``device_name`` is "auto", or "cpu" or "cuda" with an optional index.

    Raises:
        click.ClickException: PyTorch has no such device, or the device cannot compute in the dtype.
    """
    import torch

    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise click.ClickException(
            f"no such device: {device_name!r}, PyTorch sees {torch.cuda.device_count()} "
            "CUDA GPUs (see kfconvert doctor)"
        )
    try:
        sample = torch.ones(1, 1, 2, 2, device=device, dtype=dtype)
        torch.nn.functional.conv2d(sample @ sample, sample)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise click.ClickException(f"{device} cannot compute in {dtype_name}: {reason}") from error
    return device, dtype


def _result(name: str, error: str | None = None) -> dict[str, Any]:
    return {"name": name, "error": error, "skipped": False, "saved": None, "weights": None, "statistics": None}


def _one_line(name: str, error: BaseException) -> str:
    """``name: reason``; for unexpected errors also the type and the place that raised it."""
    text = str(error).strip().splitlines()
    reason = text[0] if text else ""
    if isinstance(error, ValueError) and type(error).__module__.startswith("kfconvert"):
        return reason if name in reason else f"{name}: {reason}"
    return f"{name}: {unexpected(error)}"
