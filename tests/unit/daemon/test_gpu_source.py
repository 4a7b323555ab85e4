"""The GPUs that the settings name, against those that there are."""

from __future__ import annotations

import pytest

from carma.daemon.server import check_listed
from carma.errors import BadSettings
from carma.testing.builders import gpu


def test_gpus_are_named_by_index_or_uuid() -> None:
    check_listed((), ())
    check_listed(("1", "GPU-0"), (gpu(0), gpu(1)))


def test_an_entry_that_names_no_gpu_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(BadSettings, match=r"placement\.gpus names '7', 'GPU-9'") as caught:
        check_listed(("0", "7", "GPU-9"), (gpu(0), gpu(1)))
    assert caught.value.hint.endswith("0 (GPU-0), 1 (GPU-1)")
