"""Recognises in a program's last words that MPS failed it: CUDA's errors 805 to 810, as the exception that ended it.

The texts are those of cudaGetErrorString and cuGetErrorString; PyTorch puts "CUDA error:" before them, or the name of
the call ("Unexpected error from cudaGetDeviceCount() … Error 805: …"), others give the error's name. As with an OOM,
only the end that decides counts: a warning, or an error that was caught, does not.
"""

from __future__ import annotations

from carma.launch.oom_signs import MPS_MESSAGE, deciding_end, one_line


def find_mps_failure(text: str) -> str:
    """The line that says so; '' when the text ends otherwise."""
    end = deciding_end(text)
    return one_line(end) if end is not None and MPS_MESSAGE.search(end.message.partition("\n")[0]) else ""
