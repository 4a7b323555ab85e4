"""Traces: who submits what, and when. One CSV schema of the project's own, a reader, and one shipped example."""

from carma.traces.read import parse, read
from carma.traces.schema import Trace, TraceTask
from carma.traces.shipped import SHIPPED, find

__all__ = ["SHIPPED", "Trace", "TraceTask", "find", "parse", "read"]
