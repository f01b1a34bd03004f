"""Converted models on disk: saved, and loaded again by the decisions that were recorded."""
