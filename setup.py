"""The optional C extension; everything else is in pyproject.toml."""

from __future__ import annotations

from setuptools import Extension, setup

NATIVE = Extension(
    "envherd.shm._native",
    ["shm/_native.c"],
    py_limited_api=True,
    optional=True,
    extra_compile_args=["-O2", "-std=c11"],
)

setup(ext_modules=[NATIVE], options={"bdist_wheel": {"py_limited_api": "cp311"}})
