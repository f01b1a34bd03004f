"""The options of a conversion, in one place: what they are, what they may be, and as JSON."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..runtime import MOST_RECORDINGS
from .preparation import ConversionError, first_line

_Made = TypeVar("_Made")


def _as_tuple(value: Any) -> Any:
    """A single name, or a list of some, as a tuple; anything else is left for the schema to refuse."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, (list, set, frozenset)) else value


_Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class ConversionConfig(BaseModel):
    """How a model is to be converted. It cannot be changed; two with the same options are equal.

    What is converted (the model, its inputs, device and dtype) is no part of it. ``ConversionConfig(effort="fast")``
    names the options that are not to be as usual; ``ModelConverter`` and ``auto_convert_model`` take the same ones, or
    such an object as ``config=``. ``kfconvert_info()["config"]`` has those of a converted or loaded model as a dict.

    Args:
        validate_accuracy: compare the outputs with a float64 run of the original; a site that makes them worse than
            allowed is found and dropped.
        accuracy_threshold: largest relative error that always passes. Beyond it the converted error may be at most
            1.5 times the original's own.
        select: "measured" applies a site only where it is faster on this device, and returns the model unconverted
            where the whole is slower; "all" applies every accurate site without timing.
        check_weights: after so many calls the weights behind folded and packed ones are compared with what they were,
            to find writes that leave no trace in a tensor (through ``.data``, NumPy, DLPack or a storage); 0 for never.
            Each time all of them are read. By default 100 on the CPU and 0 on CUDA.
        cuda_graphs: on CUDA, whether calls without gradients are recorded as CUDA graphs, one for each combination of
            the inputs' sizes that comes more than once, and replayed, which costs the host one launch; "auto" does so
            where it is faster for the example.
        max_recordings: how many such recordings there may be of each program, 16 by default.
        static_outputs: hand out the outputs of a replay where the recording wrote them, which saves copying them: they
            hold until the next call with inputs of the same sizes. Each recording has memory of its own then.
        max_extra_memory: how much all programs together may keep of what they derive from weights (folded and packed
            ones), as measured with the example: bytes as an int, or as a float a share of the memory of the weights and
            buffers. Sites that gain least are dropped until that holds. None for no bound.
        new_tokens: of a model that has ``generate``, how many tokens it is timed with before and after, from the prompt
            of the example; 0 for no such timing. By default as many as there is time for, from 4 to 32.
        effort: "full" or "fast". The latter captures what calls like the example need, and ``generate()`` of one
            prompt without padding, and nothing for others (further forms of the call, blocks on their own), measures
            for a quarter of the time, and leaves out sites for which no time is left. What is remembered from earlier
            conversions is not timed again in either.
        include: names of patterns, with shell wildcards: only these are fused. None for all of them.
        exclude: names of patterns, with shell wildcards, that are not fused, whether included or not.
        modules: dotted paths of modules, with shell wildcards: only sites all of whose operators lie in one of them,
            or in a module within it, are fused. ``"encoder.*"`` is the same as ``"encoder"``, and ``"*"`` reaches over
            dots. ``"!head"`` is a module in which nothing is fused; where there are only such entries, all others are
            meant. None for all of them.
        chosen_modules: the very paths of modules, without those within them: only sites all of whose operators are
            calls of these are fused. What a ``filter_fn`` has chosen is kept here. None for all of them.

    Raises:
        ConversionError: there is no such option, or it has a value that it cannot have.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    # What an option must be is said in its description, which the message of an error is made of.
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
        """The same with some ``options`` as they are given here. Raises as the class itself does."""
        return ConversionConfig(**{**dict(self), **options})

    def unusual(self) -> dict[str, Any]:
        """The options that are not as they are by themselves."""
        return {name: value for name, value in self if value != type(self).model_fields[name].default}

    def to_json(self) -> str:
        """All options as a JSON object, which ``from_json`` reads."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> ConversionConfig:
        """What ``to_json`` has written. Options that are not in it are as usual.

        Raises:
            ConversionError: it is no JSON object, has other names in it, or values that an option cannot have.
        """
        try:
            options = json.loads(text)
            if not isinstance(options, dict):
                raise ConversionError("it is no JSON object")
            return cls(**options)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConversionError(f"this is no configuration of a conversion: {first_line(error)}") from None


def _fault(error: ValidationError) -> str:
    """In one line, what the first option that is wrong must be, and what it is."""
    fault = error.errors(include_url=False, include_context=False)[0]
    name = str(fault["loc"][0])
    return f"{name} must be {ConversionConfig.model_fields[name].description}, not {fault['input']!r}"[:300]


def near(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"``, the names among ``known`` that are near, or nothing where none is."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def takes_options(function: Callable[..., _Made]) -> Callable[..., _Made]:
    """Shows, in the signature of a function with ``**options``, the options of a ``ConversionConfig``."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for name, field in ConversionConfig.model_fields.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function
