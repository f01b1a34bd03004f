"""Saving and loading of converted models with their recorded decisions, and export as programs."""

from .errors import ArtifactError
from .exporting import export
from .files import load, load_original
from .pretrained import extend_save_pretrained
from .results import artifacts_in, results_in, write_report
from .saving import check_target, save
from .schema import RECORD_FILE
