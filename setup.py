"""The optional C extension; everything else is in pyproject.toml.

Where there is no compiler, or it fails, the package is installed without it and runs in Python (`workers.native`).
"""

from __future__ import annotations

import sys
import sysconfig
import zlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = "workers/native"
IS_POSSIBLE = (
    sys.platform == "linux"
    and sys.implementation.name == "cpython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")  # has no stable ABI before 3.15
)

#: `workers.native.find` compares it: what was built from other sources is not loaded.
SOURCES = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(FOLDER).glob("*.[ch]"))))

NATIVE = Extension(
    "envherd.workers.native._native",
    [f"{FOLDER}/{name}.c" for name in ("bell", "step", "loop", "caller", "exchange")],
    depends=[f"{FOLDER}/native.h"],
    define_macros=[("_POSIX_C_SOURCE", "200809L"), ("SOURCES", f"{SOURCES}LL")],
    extra_compile_args=["-O2", "-g0", "-std=c11", "-fvisibility=hidden"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[NATIVE] if IS_POSSIBLE else [], options={"bdist_wheel": {"py_limited_api": "cp311"}})
