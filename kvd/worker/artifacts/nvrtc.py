"""Compiles CUDA with NVRTC, the compiler that MLX uses, called through ctypes.

ctypes gives up the interpreter's lock during a call, so threads compile at the same time.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")


class CompileError(Exception):
    """NVRTC refused the text; the message has its log."""


class Nvrtc:
    """The compiler of one loaded library. Raises ``OSError`` if the library cannot be loaded."""

    def __init__(self, library: str | Path, mode: int = ctypes.DEFAULT_MODE) -> None:
        self._library = ctypes.CDLL(str(library), mode=mode)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    @staticmethod
    def loaded() -> Nvrtc | None:
        """Return the compiler that is already part of this process because MLX uses it."""
        for name in LIBRARIES:
            try:
                return Nvrtc(name, os.RTLD_NOW | os.RTLD_NOLOAD)
            except (OSError, AttributeError):
                continue
        return None

    def compile(self, text: str, architecture: str) -> bytes:
        """Return the cubin of a text without includes; ``architecture``: such as ``sm_90``."""
        program = ctypes.c_void_p()
        create = ctypes.byref(program), text.encode(), b"kvd.cu", 0, None, None
        self._call("nvrtcCreateProgram", *create)
        try:
            options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
            if self._library.nvrtcCompileProgram(program, 1, options):
                log = self._buffer(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                raise CompileError(log.rstrip(b"\0\n").decode(errors="replace"))
            return self._buffer(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _buffer(self, program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_of, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(1, size.value))
        self._call(get, program, buffer)
        return buffer.raw[: size.value]

    def _call(self, name: str, *given: object) -> None:
        if code := getattr(self._library, name)(*given):
            raise CompileError(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")
