"""Conversions with a pattern of a user's own."""

import warnings
from contextlib import contextmanager

from torch.utils._pytree import tree_leaves

from kfconvert import ModelConverter, register_pattern, unregister_pattern
from kfconvert.patterns import add, every_pattern

_REGISTERED = {}


@contextmanager
def registered(reference, replacement, example, **options):
    """Registers a pattern. A registration traces the reference in each dtype, and the same one does so only once."""
    key = (reference, replacement, *map(id, tree_leaves(example)), *options.items())
    if key in _REGISTERED:
        add(_REGISTERED[key][1])
    else:
        register_pattern(reference, replacement, example, **options)
        _REGISTERED[key] = example, next(p for p in every_pattern() if p.name == options["name"])
    yield
    unregister_pattern(options["name"])


def convert(model, *inputs, **options):
    """The converted model, with every accurate site, and its statistics."""
    converter = ModelConverter(**{"select": "all", "effort": "fast", **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was fused is what some tests want
        return converter.convert_model(model.eval(), example_inputs=inputs), converter.conversion_stats


def reasons(stats, name):
    return [each["reason"] for each in (*stats["near_misses"], *stats["sites"]) if each["pattern"] == name]
