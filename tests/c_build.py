"""Compiles what the tests need in C, once for each content of the sources, into the ignored build folder."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from cffi import FFI

TESTS = Path(__file__).resolve().parent
BUILD = TESTS.parent / "build" / "tests"
CSRC = TESTS.parent / "allocator" / "csrc"
SIMULATION = ("vmm_space.c", "vmm_map.c", "vmm_share.c", "vmm_work.c", "vmm_control.c", "vmm_rules.c")
STUBS = {"cuda": ("cuda_stub.c", "cuda_query.c"), "hip": ("hip_stub.c",)}
WARNINGS = ("-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread")
SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}


def _compiler() -> str:
    return os.environ.get("CC") or shutil.which("gcc") or "cc"


def compile_c(name: str, sources: list[Path], flags: tuple[str, ...], headers: list[Path]) -> Path:
    """Compile and link; returns the path. Several processes may ask for the same at once."""
    digest = hashlib.sha256(repr((_compiler(), flags)).encode())
    for path in sorted([*sources, *headers]):
        digest.update(path.name.encode() + path.read_bytes())
    stem, suffix = os.path.splitext(name)
    target = BUILD / f"{stem}-{digest.hexdigest()[:16]}{suffix}"
    if target.exists():
        return target
    BUILD.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    subprocess.run([_compiler(), *flags, "-o", str(draft), *map(str, sources), "-ldl"], check=True)
    draft.replace(target)
    return target


def stub_library(driver: str, *extra_flags: str) -> Path:
    """Build the stub library of "cuda" or "hip"."""
    stubs = TESTS / "stubs"
    sources = [stubs / name for name in (*STUBS[driver], *SIMULATION)]
    flags = (*WARNINGS, "-std=c11", "-O1", "-fPIC", "-shared", *extra_flags)
    return compile_c(f"lib{driver}_stub.so", sources, flags, sorted(stubs.glob("*.h")))


def sanitized_program(name: str, sanitizer: str, *wrapped: str) -> Path:
    """Build tests/c/NAME.c together with the shim's sources; it defines __wrap_NAME for each wrapped."""
    sources = [TESTS / "c" / f"{name}.c", *sorted(CSRC.glob("*.c"))]
    flags = (*WARNINGS, "-std=gnu11", "-O1", f"-I{CSRC}", *SANITIZERS[sanitizer])
    flags += tuple(f"-Wl,--wrap={function}" for function in wrapped)
    return compile_c(f"{name}-{sanitizer}", sources, flags, sorted(CSRC.glob("*.h")))


@functools.cache
def sanitized_shim() -> Path:
    """Build the extension module with AddressSanitizer; its runtime has to be preloaded."""
    ffi = FFI()
    ffi.cdef((CSRC / "ekv.h").read_text())
    ffi.set_source("allocator._ekv", '#include <stddef.h>\n#include <stdint.h>\n#include "ekv.h"\n')
    BUILD.mkdir(parents=True, exist_ok=True)
    code = BUILD / f"sanitized_ekv-{os.getpid()}.c"
    ffi.emit_c_code(str(code))
    include = sysconfig.get_paths()["include"]
    flags = ("-g", "-O1", "-fPIC", "-shared", "-std=gnu11", f"-I{CSRC}", f"-I{include}", "-pthread")
    sources = [code, *sorted(CSRC.glob("*.c"))]
    try:
        return compile_c("_ekv.so", sources, (*flags, *SANITIZERS["address"]), sorted(CSRC.glob("*.h")))
    finally:
        code.unlink()


def runtime_library(name: str) -> str:
    """Return the path of one of the compiler's own libraries."""
    command = [_compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
