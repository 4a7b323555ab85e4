"""Traces: who submits what, and when. One CSV schema of the project's own, a reader, a writer, and shipped examples."""

from carma.traces.read import parse, read
from carma.traces.schema import Trace, TraceTask
from carma.traces.shipped import SHIPPED, find
from carma.traces.write import text, write

__all__ = ["SHIPPED", "Trace", "TraceTask", "find", "parse", "read", "text", "write"]
