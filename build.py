"""The FFI builder: one extension module, `allocator._ekv`, made of the C shim.

`python build.py` builds it in place; setuptools finds `ffibuilder` through `cffi_modules` in setup.py.
The module is also what PyTorch opens by path as a CUDAPluggableAllocator, so both share one state.
"""

from pathlib import Path

from cffi import FFI

CSRC = Path("allocator") / "csrc"
SOURCES = sorted(path.as_posix() for path in (Path(__file__).parent / CSRC).glob("*.c"))

ffibuilder = FFI()
ffibuilder.cdef((Path(__file__).parent / CSRC / "ekv.h").read_text())
ffibuilder.set_source(
    "allocator._ekv",
    '#include <stddef.h>\n#include <stdint.h>\n#include "ekv.h"\n',
    sources=[(CSRC / Path(source).name).as_posix() for source in SOURCES],
    include_dirs=[CSRC.as_posix()],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
    libraries=["dl", "pthread"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
