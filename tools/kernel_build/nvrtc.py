"""Compiles a .cu file with NVRTC, the compiler library of CUDA, without a GPU.

    python nvrtc.py LIBRARY SOURCE OUTPUT ARCHITECTURE [OPTION ...]     sm_90a -> a cubin, compute_90 -> PTX

NVRTC has no headers of the C library; an option names the folder of those that kernels need.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


class NvrtcError(Exception):
    pass


class Nvrtc:
    def __init__(self, library: Path) -> None:
        # It looks for its companion on the library path, where that of a wheel is not: loaded first, it is found.
        for companion in sorted(library.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(companion), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(library))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        if error := getattr(self.library, name)(*arguments):
            raise NvrtcError(f"{name}: {self.library.nvrtcGetErrorString(error).decode()}")

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def capabilities(self) -> list[int]:
        """Returns what it compiles for: 80, 86, ..."""
        count = ctypes.c_int()
        self.call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self.call("nvrtcGetSupportedArchs", found)
        return list(found)

    def text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw[: size.value]

    def compile(self, source: Path, architecture: str, options: list[str]) -> bytes:
        program = ctypes.c_void_p()
        code = source.read_bytes()
        self.call("nvrtcCreateProgram", ctypes.byref(program), code, str(source).encode(), 0, None, None)
        try:
            options = [f"--gpu-architecture={architecture}", *options]
            values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            try:
                self.call("nvrtcCompileProgram", program, len(options), values)
            finally:
                sys.stderr.write(self.text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace"))
            return self.text(program, "CUBIN" if architecture.startswith("sm_") else "PTX")
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


def main(library: str, source: str, output: str, architecture: str, *options: str) -> int:
    try:
        code = Nvrtc(Path(library)).compile(Path(source), architecture, list(options))
    except NvrtcError as error:
        print(f"{source} for {architecture}: {error}", file=sys.stderr)
        return 1
    Path(output).write_bytes(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
