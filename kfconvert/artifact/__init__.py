"""Saving and loading of converted models with their recorded decisions, and export as programs."""

from .errors import ArtifactError
from .exporting import export
from .files import check_target, load, load_original, save
from .results import artifacts_in, results_in, write_report
from .schema import RECORD_FILE
from .sidecar import write_beside

__all__ = [
    "ArtifactError",
    "RECORD_FILE",
    "artifacts_in",
    "check_target",
    "export",
    "load",
    "load_original",
    "results_in",
    "save",
    "write_beside",
    "write_report",
]
