"""The options of a conversion: names, allowed values, and JSON form."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..runtime import MOST_RECORDINGS
from .checks import ConversionError, first_line

_Made = TypeVar("_Made")


def _as_tuple(value: Any) -> Any:
    """Converts a single name or a list of names to a tuple; the schema rejects anything else."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, (list, set, frozenset)) else value


_Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class ConversionConfig(BaseModel):
    """The immutable options of a conversion. Configurations with the same options are equal.

    The model, its inputs, device and dtype are not part of it. ``ConversionConfig(effort="fast")`` names only the
    options that differ from the defaults. ``ModelConverter`` and ``auto_convert_model`` take the same options, or such
    an object as ``config=``. ``kfconvert_info()["config"]`` has those of a converted or loaded model as a dict.

    Args:
        validate_accuracy: compare the outputs with a float64 run of the original, and drop the sites that make the
            outputs less accurate than allowed.
        accuracy_threshold: largest relative error that always passes. A larger error passes if it is at most
            1.5 times the original's.
        select: "measured" applies an accurate site only if it is not slower on this device, and returns the original
            if the converted model is slower as a whole. "all" applies every accurate site without timing.
        check_weights: number of calls after which the sources of folded and packed weights are compared with their
            earlier values; 0 for never. This detects writes that do not change the version counter (``.data``,
            NumPy, DLPack, a storage). Each check reads all of these weights. Default: 100 on the CPU, 0 on CUDA.
        cuda_graphs: on CUDA, whether to record calls without gradients as CUDA graphs, and replay them with one launch.
            Each combination of input sizes that recurs gets a recording. "auto" does so if it is faster for the
            example. With ``training=True``, False also leaves training steps without recordings.
        max_recordings: maximum number of such recordings of each program, 16 by default.
        static_outputs: return the outputs of a replay in the recording's memory, which saves a copy. They are valid
            until the next call with inputs of the same sizes. Each recording then has separate memory.
        max_extra_memory: maximum memory of derived (folded and packed) weights in all programs together, as measured
            with the example. An int is bytes, a float a share of the memory of weights and buffers. Sites with the
            smallest gain are dropped until the limit holds. None for no limit.
        new_tokens: for a model with ``generate``, the number of tokens to time before and after, from the prompt of
            the example; 0 for no timing. By default, 4 to 32 tokens, as time allows.
        effort: "full" or "fast". "fast" captures only calls like the example, and ``generate()`` of one prompt
            without padding: no further call forms, and no separate blocks. It measures for a quarter of the time,
            and skips sites for which no time remains. Only "full" compiles recorded programs with TorchInductor, too.
            Both use cached times of earlier conversions.
        training: in train mode, calls with gradients run the original forward compiled: TorchDynamo captures it, and
            TorchInductor compiles it in the first call. In these calls, language models of transformers that return a
            loss return no logits.
        include: names of patterns, with shell wildcards: only these are fused. None for all patterns.
        exclude: names of patterns, with shell wildcards, that are not fused, even if included.
        modules: dotted paths of modules, with shell wildcards. A site is fused only if one of these modules, with its
            submodules, contains all operators of the site. ``"encoder.*"`` equals ``"encoder"``, and ``"*"`` also
            matches dots. ``"!head"`` excludes a module; a list of only such entries includes all other modules.
            None for all modules.
        chosen_modules: exact paths of modules, without their submodules: a site is fused only if all its operators
            are calls of these modules. A ``filter_fn`` sets this option. None for all modules.

    Raises:
        ConversionError: an option does not exist, or its value is invalid.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    # The description of an option states its valid values, and becomes part of the error message.
    validate_accuracy: bool = Field(True, description="True or False")
    accuracy_threshold: float = Field(1e-6, ge=0, description="a number of at least 0")
    select: Literal["measured", "all"] = Field("measured", description="'measured' or 'all'")
    check_weights: int | None = Field(None, ge=0, description="a number of calls, 0 for never")
    cuda_graphs: bool | Literal["auto"] = Field("auto", description="True, False or 'auto'")
    max_recordings: int = Field(MOST_RECORDINGS, ge=1, description="a number of recordings, at least 1")
    static_outputs: bool = Field(False, description="True or False")
    max_extra_memory: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0)] | None = Field(
        None, description="bytes as an int or a share as a float, at least 0"
    )
    new_tokens: int | None = Field(None, ge=0, description="a number of tokens, 0 for no timing of generate")
    effort: Literal["fast", "full"] = Field("full", description="'fast' or 'full'")
    training: bool = Field(False, description="True or False")
    include: _Names | None = Field(None, description="a list of names of patterns")
    exclude: _Names = Field((), description="a list of names of patterns")
    modules: _Names | None = Field(None, description="a list of paths of modules")
    chosen_modules: _Names | None = Field(None, description="a list of paths of modules")

    def __init__(self, **options: Any):
        for name in options:
            if name not in type(self).model_fields:
                raise ConversionError(f"there is no option {name!r}{near(name, type(self).model_fields)}")
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConversionError(_fault(error)) from None

    def changed(self, **options: Any) -> ConversionConfig:
        """Returns a copy with these ``options`` replaced. Raises like the class itself."""
        return ConversionConfig(**{**dict(self), **options})

    def unusual(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults."""
        return {name: value for name, value in self if value != type(self).model_fields[name].default}

    def to_json(self) -> str:
        """Returns all options as a JSON object, which ``from_json`` reads."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> ConversionConfig:
        """Reads the result of ``to_json``. Missing options get their defaults.

        Raises:
            ConversionError: the text is not a JSON object, or has unknown options or invalid values.
        """
        try:
            options = json.loads(text)
            if not isinstance(options, dict):
                raise ConversionError("it is not a JSON object")
            return cls(**options)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConversionError(f"invalid conversion configuration: {first_line(error)}") from None


def _fault(error: ValidationError) -> str:
    """Describes the first invalid option in one line: its valid values, and its value."""
    fault = error.errors(include_url=False, include_context=False)[0]
    name = str(fault["loc"][0])
    return f"{name} must be {ConversionConfig.model_fields[name].description}, not {fault['input']!r}"[:300]


def near(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'a' or 'b'?"`` with similar names in ``known``, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def takes_options(function: Callable[..., _Made]) -> Callable[..., _Made]:
    """Adds the options of a ``ConversionConfig`` to the signature of a function with ``**options``."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for name, field in ConversionConfig.model_fields.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function
