"""``kfconvert.explain.Explanation``; see kfconvert.report."""

from .report import Explanation

__all__ = ["Explanation"]
