"""Compilation of CUDA source by nvrtc, once per machine, and launches of the compiled functions.

nvrtc comes with every CUDA build of torch and compiles a kernel in about a second; neither nvcc nor a host compiler is
needed. The machine code is kept in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import Any

import torch

from kvbench.util import atomic
from kvbench.util import compiled as kernels

#: options of nvrtc in addition to the architecture
OPTIONS = ("--std=c++17", "-default-device")


@cache
def missing() -> str | None:
    """Return the reason why this machine cannot compile or run CUDA kernels, or None if it can."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return "the package cuda-bindings is not installed"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80"
    return None


class Function:
    """A CUDA function (kernel), compiled and loaded on one device.

    Args:
        source: CUDA source text, including macro definitions.
        name: name of the function, declared ``extern "C"``.
        threads: number of threads of a CTA.
        shared: bytes of dynamic shared memory of a CTA.
        overlapped: True to launch by programmatic dependent launch (sm_90 and later): CTAs may start before the kernel
            launched before it has ended, and must wait for it (``griddepcontrol.wait``) before they read what it wrote.

    Attributes:
        registers: number of registers per thread.
        spilled: bytes of local memory per thread, needed for what does not fit into registers.
        fit: number of CTAs that a multiprocessor can run at once.
        resident: number of CTAs that the whole GPU can run at once.

    Raises:
        RuntimeError: nvrtc or the driver reported an error, which the message contains.
    """

    def __init__(
        self, source: str, name: str, device: int, threads: int, shared: int, overlapped: bool = False
    ) -> None:
        self.threads, self.shared, self.overlapped = threads, shared, overlapped
        major, minor = torch.cuda.get_device_capability(device)
        binary = compiled(source, f"sm_{major}{minor}", name)
        with torch.cuda.device(device):  # a module belongs to the context that is current when it is loaded
            self._load(binary, name, device)

    def _load(self, binary: bytes, name: str, device: int) -> None:
        from cuda.bindings import driver

        self.module = ask(driver.cuModuleLoadData(binary))
        self.function = ask(driver.cuModuleGetFunction(self.module, name.encode()))
        attribute = driver.CUfunction_attribute
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ask(driver.cuFuncSetAttribute(self.function, most, self.shared))
        self.registers = ask(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, self.function))
        self.spilled = ask(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, self.function))
        self.fit = ask(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, self.threads, self.shared))
        self.resident = self.fit * torch.cuda.get_device_properties(device).multi_processor_count
        self._driver = driver
        if self.overlapped:
            chosen = driver.CUlaunchAttribute()
            chosen.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            chosen.value.programmaticStreamSerializationAllowed = 1
            self._attributes = [chosen]

    def launch(self, grid: tuple[int, int, int], arguments: bytes, stream: int) -> None:
        """Launch the function on a CUDA stream, given by its handle.

        `arguments` are the bytes of the function's only argument, a struct; `grid` counts CTAs.

        Raises:
            RuntimeError: the driver reported an error, which the message names.
        """
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        if self.overlapped:
            config = self._driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
            config.sharedMemBytes, config.hStream = self.shared, self._driver.CUstream(stream)
            config.attrs, config.numAttrs = self._attributes, 1
            ask(self._driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))
            return
        size = (self.threads, 1, 1)
        values = ctypes.addressof(pointers)
        ask(self._driver.cuLaunchKernel(self.function, *grid, *size, self.shared, stream, values, 0))


def compiled(source: str, architecture: str, name: str = "kernel") -> bytes:
    """Return the machine code (cubin) of CUDA source, compiled by nvrtc or read from the cache on disk.

    The architecture is that of the GPU, such as ``sm_90``; the kernel's name is for messages.

    Raises:
        RuntimeError: nvrtc could not compile the source; the message contains its log.
    """
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={architecture}", *OPTIONS]
    words = "\n".join([repr(nvrtc.nvrtcVersion()), *options, source])
    path = None
    with contextlib.suppress(OSError):  # without a folder of one's own, each process compiles again, for a second
        path = kernels.folder() / f"{kernels.key(words)}.cubin"
        if path.is_file():
            return path.read_bytes()
    program = ask(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    if nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0].value:
        log = bytearray(ask(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"nvrtc could not compile the {name} kernel: {log.decode(errors='replace')}")
    binary = bytearray(ask(nvrtc.nvrtcGetCUBINSize(program)))
    ask(nvrtc.nvrtcGetCUBIN(program, binary))
    if path is not None:
        with contextlib.suppress(OSError):
            atomic.replace_file(path, bytes(binary))
    return bytes(binary)


def ask(answer: tuple[Any, ...]) -> Any:
    """Return what a cuda.bindings call answered after its error code: one value, or a tuple of none or several.

    Raises:
        RuntimeError: the call failed; the message names the error.
    """
    if answer[0].value:
        raise RuntimeError(f"CUDA: {answer[0]!r}")
    return answer[1] if len(answer) == 2 else answer[1:]
