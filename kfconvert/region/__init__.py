"""Captured graphs: their guards, and the tensors that they read."""

from .guard import Dimensions, Guard, given_as, guard_from_placeholders
from .live_tensors import LiveTensors, Place
from .region import CaptureError, Read, Region
from .stored import made_region, store_graph, stored_graph
