"""libdcgm by ctypes: the few calls that are needed, with the layouts of dcgm_structs.h (the same in DCGM 3 and 4).

The library connects to the host engine (nv-hostengine) of this machine. It configures nothing, and watches end with the
connection. DCGM's own Python bindings are not used: they are not on PyPI and fit one version of the library only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int, c_uint, c_ushort
from ctypes import c_size_t as c_handle  # uintptr_t, which has no name in ctypes
from typing import Any, NamedTuple

LIBRARIES = ("libdcgm.so.4", "libdcgm.so.3")
GPU, GPU_INSTANCE = 1, 4  # dcgm_field_entity_group_t
GROUP_EMPTY = 1
LIVE = 1  # DCGM_FV_FLAG_LIVE_DATA: query the driver now, whether the field is watched or not
UUID_FIELD = 54
DOUBLE, STRING = ord("d"), ord("s")
MAX_GPUS = 32
MAX_HIERARCHY = MAX_GPUS * 14
NO_FUNCTION = -20  # DCGM_ST_FUNCTION_NOT_FOUND


class DcgmError(Exception):
    """A call was refused; the number is dcgm_structs.h's `dcgmReturn_t`."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed with {code}")
        self.code = code


class Entity(NamedTuple):
    """A GPU or a GPU instance, by a number of DCGM's own."""

    group: int
    number: int


class Value(NamedTuple):
    entity: Entity
    field: int
    status: int
    at_us: int  # since the epoch
    value: float | str | None  # None: of another type than the two that are requested


def _fields(**types: Any) -> list[tuple[str, Any]]:
    return list(types.items())


class _ConnectParams(Structure):
    _fields_ = _fields(version=c_uint, persist=c_uint, timeout_ms=c_uint, address_is_unix_socket=c_uint)


class _Pair(Structure):
    _fields_ = _fields(group=c_uint, number=c_uint)


class _MigInfo(Structure):
    _fields_ = [
        *_fields(gpu_uuid=ctypes.c_char * 128, nvml_gpu_index=c_uint, nvml_instance_id=c_uint),
        *_fields(nvml_compute_instance_id=c_uint, nvml_mig_profile_id=c_uint, nvml_profile_slices=c_uint),
    ]


class _MigEntry(Structure):
    _fields_ = _fields(entity=_Pair, parent=_Pair, info=_MigInfo)


class _MigHierarchy(Structure):
    _fields_ = _fields(version=c_uint, count=c_uint, entries=_MigEntry * MAX_HIERARCHY)


class _Content(ctypes.Union):
    _fields_ = _fields(i64=ctypes.c_int64, dbl=ctypes.c_double, str=ctypes.c_char * 256, blob=ctypes.c_char * 4096)


class _FieldValue(Structure):
    """dcgmFieldValue_v2."""

    _fields_ = [
        *_fields(version=c_uint, entity_group=c_uint, entity_id=c_uint, field_id=c_ushort, field_type=c_ushort),
        *_fields(status=c_int, unused=c_uint, ts=ctypes.c_int64, value=_Content),
    ]


def version_of(structure: type[Structure], number: int) -> int:
    """MAKE_DCGM_VERSION: the size, and the version in the top byte."""
    return ctypes.sizeof(structure) | number << 24


_IDS, _VALUES = POINTER(c_ushort), POINTER(_FieldValue)
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "dcgmInit": (),
    "dcgmShutdown": (),
    "dcgmConnect_v2": (ctypes.c_char_p, POINTER(_ConnectParams), POINTER(c_handle)),
    "dcgmDisconnect": (c_handle,),
    "dcgmGetAllSupportedDevices": (c_handle, POINTER(c_uint), POINTER(c_int)),
    "dcgmGetGpuInstanceHierarchy": (c_handle, POINTER(_MigHierarchy)),
    "dcgmGroupCreate": (c_handle, c_int, ctypes.c_char_p, POINTER(c_handle)),
    "dcgmGroupDestroy": (c_handle, c_handle),
    "dcgmGroupAddEntity": (c_handle, c_handle, c_uint, c_uint),
    "dcgmFieldGroupCreate": (c_handle, c_int, _IDS, ctypes.c_char_p, POINTER(c_handle)),
    "dcgmFieldGroupDestroy": (c_handle, c_handle),
    "dcgmWatchFields": (c_handle, c_handle, c_handle, ctypes.c_longlong, ctypes.c_double, c_int),
    "dcgmEntitiesGetLatestValues": (c_handle, POINTER(_Pair), c_uint, _IDS, c_uint, c_uint, _VALUES),
}


def open_library(names: Sequence[str] = LIBRARIES) -> Libdcgm | None:
    """The newest libdcgm of this machine, initialised; None if there is none, or it does not start."""
    for name in names:
        try:
            return Libdcgm(ctypes.CDLL(name))
        except (OSError, DcgmError):
            continue
    return None


class Libdcgm:
    """A loaded library. Every method raises DcgmError. Calls block as long as the host engine lets them, and do not
    block other threads meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, c_int
        self._call("dcgmInit")

    def connect(self, address: str, timeout_ms: int) -> int:
        """The handle of the connection."""
        handle = c_handle()
        params = _ConnectParams(version=version_of(_ConnectParams, 2), timeout_ms=timeout_ms)
        self._call("dcgmConnect_v2", address.encode(), byref(params), byref(handle))
        return handle.value

    def disconnect(self, handle: int) -> None:
        self._call("dcgmDisconnect", handle)

    def gpus(self, handle: int) -> list[Entity]:
        numbers, count = (c_uint * MAX_GPUS)(), c_int()
        self._call("dcgmGetAllSupportedDevices", handle, numbers, byref(count))
        return [Entity(GPU, number) for number in numbers[: count.value]]

    def instances(self, handle: int) -> list[tuple[str, int, Entity]]:
        """Instances of cards in MIG mode: the card's UUID, the GPU instance's number in NVML, the entity."""
        hierarchy = _MigHierarchy(version=version_of(_MigHierarchy, 2))
        self._call("dcgmGetGpuInstanceHierarchy", handle, byref(hierarchy))
        entries = hierarchy.entries[: min(hierarchy.count, MAX_HIERARCHY)]
        return [
            (_text(entry.info.gpu_uuid), entry.info.nvml_instance_id, Entity(GPU_INSTANCE, entry.entity.number))
            for entry in entries
            if entry.entity.group == GPU_INSTANCE
        ]

    def watch(self, handle: int, name: str, entities: Sequence[Entity], fields: Sequence[int], every_s: float) -> None:
        """Samples are kept for ten periods. A group that cannot be watched is removed again."""
        group, field_group = c_handle(), c_handle()
        self._call("dcgmGroupCreate", handle, GROUP_EMPTY, name.encode(), byref(group))
        try:
            for entity in entities:
                self._call("dcgmGroupAddEntity", handle, group, entity.group, entity.number)
            ids = (c_ushort * len(fields))(*fields)
            self._call("dcgmFieldGroupCreate", handle, len(fields), ids, name.encode(), byref(field_group))
            self._call("dcgmWatchFields", handle, group, field_group, round(every_s * 1e6), 10 * every_s, 0)
        except DcgmError:
            self._quietly("dcgmGroupDestroy", handle, group)
            if field_group.value:
                self._quietly("dcgmFieldGroupDestroy", handle, field_group)
            raise

    def latest(
        self, handle: int, entities: Sequence[Entity], fields: Sequence[int], *, live: bool = False
    ) -> list[Value]:
        pairs = (_Pair * len(entities))(*(_Pair(*entity) for entity in entities))
        ids = (c_ushort * len(fields))(*fields)
        values = (_FieldValue * (len(entities) * len(fields)))()
        for value in values:
            value.version = version_of(_FieldValue, 2)
        flags = LIVE if live else 0
        self._call("dcgmEntitiesGetLatestValues", handle, pairs, len(pairs), ids, len(ids), flags, values)
        return [_value(value) for value in values]

    def close(self) -> None:
        self._quietly("dcgmShutdown")

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DcgmError(name, NO_FUNCTION)
        code = function(*arguments)
        if code != 0:
            raise DcgmError(name, code)

    def _quietly(self, name: str, *arguments: object) -> None:
        """Clean-up: what cannot be removed ends with the connection."""
        try:
            self._call(name, *arguments)
        except DcgmError:
            return


def _value(given: _FieldValue) -> Value:
    content: float | str | None = None
    if given.field_type == DOUBLE:
        content = given.value.dbl
    elif given.field_type == STRING:
        content = _text(given.value.str)
    return Value(Entity(given.entity_group, given.entity_id), given.field_id, given.status, given.ts, content)


def _text(given: bytes) -> str:
    return given.decode("utf-8", errors="replace")
