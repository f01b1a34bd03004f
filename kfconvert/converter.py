"""``ModelConverter`` and ``auto_convert_model``. See ``conversion/pipeline.py`` for the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .accuracy import copied_model
from .artifact import extend_save_pretrained
from .conversion import (
    ConversionConfig,
    ConversionError,
    FilterFn,
    Progress,
    Request,
    check_arguments,
    check_callback,
    check_methods,
    check_names,
    convert,
    first_line,
    takes_options,
)
from .pipelines import PipelineStats, calls_of, is_pipeline, recorded, served
from .report import Explanation, module_classes
from .runtime import OnMiss

__all__ = ["ConversionConfig", "ConversionError", "ModelConverter", "auto_convert_model"]


class ModelConverter:
    """Converts models. ``conversion_stats`` has the statistics of the last conversion.

    Args:
        config: options of the conversion; defaults if None.
        filter_fn: called as ``filter_fn(module, name)`` for each module of a model, with its dotted path ("" for the
            model itself). Returns whether the computation in the module's forward, without its submodules, may be
            fused. A site that covers calls of several modules needs all of them. The selection replaces
            ``chosen_modules`` in the configuration of the conversion.
        on_miss: called as ``on_miss(reason)`` each time that the converted model, or a part of it, runs its original
            forward (fallback), with the reason that ``kfconvert_info()`` counts; not while a compiler traces it. An
            exception in it ends the call, and it must not call the model. Pickles and artifacts drop it.
        options: options of ``ConversionConfig``, see there. They override ``config``.

    Raises:
        ConversionError: an option does not exist, has an invalid value, or names an unknown pattern.
    """

    @takes_options
    def __init__(
        self,
        config: ConversionConfig | None = None,
        *,
        filter_fn: FilterFn | None = None,
        on_miss: OnMiss | None = None,
        **options: Any,
    ):
        if config is not None and not isinstance(config, ConversionConfig):
            raise ConversionError(f"config must be a ConversionConfig, not {config!r}"[:300])
        if filter_fn is not None and not callable(filter_fn):
            raise ConversionError(f"filter_fn must be a function of a module and its name, not {filter_fn!r}"[:300])
        check_callback(on_miss)
        self.config = (config or ConversionConfig()).changed(**options)
        check_names(self.config)
        self.filter_fn, self.on_miss = filter_fn, on_miss
        self.conversion_stats: dict[str, Any] = {}
        self._classes: dict[str, str] = {}

    def convert_model(
        self,
        model: Any,
        input_shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        *,
        example_inputs: Any = None,
        dtype: torch.dtype | None = None,
        inplace: bool = False,
        progress: Progress | None = None,
        tune_for: Sequence[Any] | None = None,
        example_calls: Mapping[str, Any] | None = None,
        profile: bool = False,
    ) -> Any:
        """Returns a converted copy of ``model`` in eval mode: same class, same state dict, fused forward.

        A *pipeline* is an object that is not a module and runs modules, or a module with ``example_calls`` but no
        other example. kfconvert runs its example calls, converts in place each module that they call outside of other
        modules, and returns it. Its statistics are a ``PipelineStats``. Only a module is copied first.

        Args:
            model: an ``nn.Module`` or a pipeline.
            input_shape: shape of the single input, batch first; token models receive integers. The batch size, and
                the sequence length of token models, may vary in later calls.
            device: device of the conversion and the model; default: the model's device. "auto" is CUDA if available.
            example_inputs: instead of ``input_shape``: a tensor, a tuple of arguments or a dict of keyword arguments.
                For a pipeline, any other value is its only argument.
            dtype: floating-point dtype for the model and its inputs. By default, the model keeps its dtype, and
                ``example_inputs`` keep theirs, or are cast to the model's dtype if the model does not accept them.
            inplace: convert ``model`` instead of a deep copy.
            progress: called with (stage, done, total); stages "trace", "match", "select", "replace", "validate",
                "compile" and "compare" (on CUDA), "memory", "time".
            tune_for: the inputs to optimize for, such as batch sizes 1 and 32, or short and long sequences. Each is a
                shape, example inputs, or ``Weighted(inputs, weight)``. The weighted sum of the times for all of them
                decides what is fused, and how; by default, the time for the example. If there is no other example, the
                first of these is the example.
            example_calls: inputs of other public methods, by name, such as ``{"decode": (latents,)}``; each like
                ``example_inputs``. The modules that these methods run are captured for these calls, and the calls are
                checked and timed like the forward.
            profile: measure the share of each module in the time of the original's forward, and the fused share:
                ``time_shares`` in the statistics, which ``explain`` shows. It takes about a second.

        Raises:
            ConversionError: the model cannot run with these inputs, dtype or device; an argument is invalid; or the
                call is within a ``TorchFunctionMode``, whose effects would stay in the model.
        """
        check_arguments(progress, inplace, profile)
        if is_pipeline(model, any(each is not None for each in (input_shape, example_inputs, tune_for)), example_calls):
            if any(each is not None for each in (input_shape, device, dtype, tune_for)):
                reason = "only a torch.nn.Module with an example of its forward takes them"
                raise ConversionError(f"a pipeline takes none of input_shape, device, dtype and tune_for: {reason}")
            return self._convert_pipeline(model, example_inputs, example_calls, inplace, progress, profile)
        request = Request(
            input_shape=input_shape,
            example_inputs=example_inputs,
            device=device,
            dtype=dtype,
            inplace=inplace,
            tune_for=tune_for,
            example_calls=example_calls,
        )
        converted, self.conversion_stats = convert(
            model, request, self.config, self.filter_fn, self.on_miss, progress, profile
        )
        self._classes = module_classes(converted)
        extend_save_pretrained(converted)
        return converted

    def _convert_pipeline(
        self,
        pipeline: Any,
        example_inputs: Any,
        example_calls: Mapping[str, Any] | None,
        inplace: bool,
        progress: Progress | None,
        profile: bool,
    ) -> Any:
        """Converts the modules in ``pipeline``; see ``convert_model``."""
        if isinstance(pipeline, nn.Module) and not inplace:
            try:
                pipeline = copied_model(pipeline)
            except Exception as error:  # the model's own code may raise anything
                reason = f"the pipeline cannot be copied ({first_line(error)}); pass inplace=True"
                raise ConversionError(reason) from error
        calls = calls_of(pipeline, example_inputs, check_methods(pipeline, example_calls))
        stats = PipelineStats(pipeline=type(pipeline).__name__, modules={}, served={}, not_converted={})
        converted = {}
        for path, (module, example) in recorded(pipeline, calls).items():
            try:
                self.convert_model(module, example_inputs=example, inplace=True, progress=progress, profile=profile)
                converted[path], stats["modules"][path] = module, self.conversion_stats
            except ConversionError as error:
                stats["not_converted"][path] = str(error)
        if not converted:
            path, reason = next(iter(stats["not_converted"].items()))
            raise ConversionError(f"no module of the {type(pipeline).__name__} was converted; {path}: {reason}")
        stats["served"] = served(converted, calls)
        self.conversion_stats, self._classes = stats, {}
        return pipeline

    def explain(self) -> Explanation:
        """Returns the last conversion as a printable tree of the model's modules. It shows what was fused in each
        module. For other calls it shows the nearest pattern and the call that prevented it, with file and line.

        Raises:
            ConversionError: no model has been converted yet, or the last one was a pipeline.
        """
        if not self.conversion_stats:
            raise ConversionError("there is nothing to explain yet: call convert_model first")
        if isinstance(self.conversion_stats, PipelineStats):
            raise ConversionError("explain needs a single module, not a pipeline")
        return Explanation(self.conversion_stats, self._classes)


@takes_options
def auto_convert_model(
    model: Any,
    input_shape: Sequence[int] | None = None,
    *,
    example_inputs: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    inplace: bool = False,
    tune_for: Sequence[Any] | None = None,
    example_calls: Mapping[str, Any] | None = None,
    config: ConversionConfig | None = None,
    filter_fn: FilterFn | None = None,
    on_miss: OnMiss | None = None,
    **options: Any,
) -> Any:
    """Calls ``ModelConverter(config, ...).convert_model(model, ...)``. See :class:`ModelConverter`."""
    converter = ModelConverter(config, filter_fn=filter_fn, on_miss=on_miss, **options)
    return converter.convert_model(
        model,
        input_shape,
        device,
        example_inputs=example_inputs,
        dtype=dtype,
        inplace=inplace,
        tune_for=tune_for,
        example_calls=example_calls,
    )
