"""Finds patterns in a graph and replaces them with fused modules."""

from .matcher import find
from .pattern import Case, Findings, Match, NearMiss, Pattern, Replacement, UnmatchedActivation
from .rewriter import rewrite
from .site import Site
