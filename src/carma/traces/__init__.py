"""Traces: tasks with their arrival times. The CSV format, its reader, and the published traces."""

from carma.traces.reader import parse, read
from carma.traces.schema import Trace, TraceTask
from carma.traces.table import SHIPPED, find

__all__ = ["SHIPPED", "Trace", "TraceTask", "find", "parse", "read"]
