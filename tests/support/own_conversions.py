"""Conversions with a pattern of a user's own."""

import warnings
from contextlib import contextmanager

from kfconvert import ModelConverter, register_pattern, unregister_pattern


@contextmanager
def registered(*args, **options):
    register_pattern(*args, **options)
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
