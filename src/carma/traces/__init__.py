"""Traces: which tasks arrive when. The CSV format, its reader, and the published traces that the demo replays."""

from carma.traces.reader import parse, read
from carma.traces.schema import Trace, TraceTask
from carma.traces.shipped import SHIPPED, find

__all__ = ["SHIPPED", "Trace", "TraceTask", "find", "parse", "read"]
