"""The driver's interface: every call goes through its C signature; errors are typed, and some are the end."""

import ctypes
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from gpu.cpu_driver import CpuLibrary

from kvevents_service import cuda
from kvevents_service.cuda import NEWER, SIGNATURES, CudaError, CudaMissing, Driver, load_driver

HEADER = Path("/usr/local/cuda/include/cuda.h")
C_TYPES = {
    "unsigned int": ctypes.c_uint,
    "int": ctypes.c_int,
    "size_t": ctypes.c_size_t,
    "CUdevice": ctypes.c_int,
    "CUdevice_attribute": ctypes.c_int,
    "CUpointer_attribute": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    "CUipcMemHandle": cuda.Handle,
    "CUipcEventHandle": cuda.Handle,
    "CUuuid": cuda.Uuid,
    "CUmemcpyAttributes": cuda.CopyAttributes,
    **dict.fromkeys(("CUcontext", "CUevent", "CUstream", "void *"), ctypes.c_void_p),
    "char *": ctypes.c_char_p,
}


def test_a_failure_names_the_call() -> None:
    library = CpuLibrary()
    library.fail["cuInit"] = 100
    with pytest.raises(CudaError, match=r"cuInit: CUDA_ERROR_OF_TESTS \(100\)"):
        Driver(library).call("cuInit", 0)


@pytest.mark.parametrize(("code", "sticky"), [(1, False), (2, False), (700, True), (719, True), (999, True)])
def test_some_errors_are_the_end_of_a_device(code: int, sticky: bool) -> None:
    assert CudaError("cuInit", code, "").sticky is sticky


def test_devices_are_known_by_their_uuid() -> None:
    assert Driver(CpuLibrary(uuid_bytes=b"\0" + b"u" * 15)).uuids() == [b"\0" + b"u" * 15]


@pytest.mark.parametrize("batches", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", None])
def test_copies_go_over_in_either_form_of_the_call(batches: str | None) -> None:
    library = CpuLibrary(batches=batches)
    driver = Driver(library)
    driver.call("cuCtxSetCurrent", driver.address("cuDevicePrimaryCtxRetain", 0))
    stream = driver.address("cuStreamCreateWithPriority", 1, 0)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    starts = np.array([0, 16, 40], dtype=np.uint64)
    pieces = starts + np.uint64(target.ctypes.data), starts + np.uint64(source.ctypes.data)
    sizes = np.array([8, 8, 24], dtype=np.uint64)
    assert driver.batches is (batches is not None)
    if driver.batches:
        driver.copy_batch(*pieces, sizes, stream)
    else:
        driver.copy_each(zip(*(column.tolist() for column in (*pieces, sizes)), strict=True), stream)
    driver.call("cuStreamSynchronize", stream)
    copied = np.isin(np.arange(64), [*range(8), *range(16, 24), *range(40, 64)])
    assert (target == np.where(copied, source, 0)).all()


def test_a_machine_without_a_driver_says_so() -> None:
    try:
        ctypes.CDLL(cuda.LIBRARY)
    except OSError:
        load_driver.cache_clear()
        with pytest.raises(CudaMissing, match=cuda.LIBRARY):
            load_driver()
    else:
        pytest.skip("this machine has a driver")


@lru_cache(1)
def header() -> str:
    """Without macros: names are those that the library exports."""
    command = ["gcc", "-E", f"-I{HEADER.parent}", str(HEADER)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not HEADER.exists() or shutil.which("gcc") is None, reason="no cuda.h, or no gcc")
@pytest.mark.parametrize("name", [name for name in SIGNATURES | NEWER if name != "cuMemcpyBatchAsync"])
def test_signatures_are_those_of_the_header(name: str) -> None:
    found = re.search(rf"CUresult\s+{name}\(([^)]*)\)", header())
    assert found, name
    arguments = [re.sub(r"\bconst\b", "", argument).strip() for argument in found[1].split(",")]
    assert [_ctype(argument) for argument in arguments] == list((SIGNATURES | NEWER)[name])


def _ctype(argument: str) -> object:
    """`CUstream hStream` -> c_void_p, `size_t *sizes` -> POINTER(c_size_t)."""
    kind, stars = re.sub(r"\w+$", "", argument).strip(), argument.count("*")
    base = re.sub(r"_v\d$|_st$", "", kind.replace("*", "").strip())
    if base in ("void", "char") and stars:
        base, stars = f"{base} *", stars - 1
    return ctypes.POINTER(C_TYPES[base]) if stars else C_TYPES[base]
