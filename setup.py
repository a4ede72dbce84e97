"""Builds the optional C extension, and sets links for a package index; everything else is in pyproject.toml.

If the extension cannot be compiled, the package is installed without it and runs in Python (`workers.native`).

For a release, the environment variable `ENVHERD_URL` is the address of the repository. With it, the metadata has the
project's URLs, and the links and pictures of README become absolute. Without it, README is used unchanged.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tomllib
import zlib
from pathlib import Path

from setuptools import Extension, setup

#: The C files: the worker's part, and the caller's.
FILES = sorted(Path().glob("*/native/*.[ch]"))
IS_POSSIBLE = (
    sys.platform == "linux"
    and sys.implementation.name == "cpython"
    # Without a stable ABI before Python 3.15.
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)

#: Checksum of the C sources. `workers.native` does not load an extension that was built from other sources.
SOURCES = zlib.crc32(b"".join(path.read_bytes() for path in FILES))

NATIVE = Extension(
    "envherd.workers.native._native",
    [str(path) for path in FILES if path.suffix == ".c"],
    depends=[str(path) for path in FILES if path.suffix == ".h"],
    include_dirs=["workers/native"],
    define_macros=[("_POSIX_C_SOURCE", "200809L"), ("SOURCES", f"{SOURCES}LL")],
    extra_compile_args=["-O2", "-g0", "-std=c11", "-fvisibility=hidden"],
    extra_link_args=["-pthread"],
    py_limited_api=True,
    optional=True,
)

URL = os.environ.get("ENVHERD_URL", "").rstrip("/")
#: A relative target of a Markdown link or picture, or of an HTML picture. An anchor alone does not match.
RELATIVE = re.compile(r"""(\]\(|src(?:set)?=")(?!\w+:|#)([^)"\s]+)""")


def at_tag(path: str) -> str:
    """Return the URL of a file at the tag of this version; for a picture, the URL of the raw file."""
    version = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]["version"]
    return f"{URL}/{'raw' if path.endswith('.png') else 'blob'}/v{version}/{path}"


def description() -> str:
    """Return README, with absolute links if the repository's address is known."""
    text = Path("README.md").read_text(encoding="utf-8")
    if not URL:
        return text
    return RELATIVE.sub(lambda found: found[1] + at_tag(found[2]), text).replace(
        "<this repository>", URL
    )


def urls() -> dict[str, str]:
    """Return the project's URLs; empty if the repository's address is not known.

    Raises:
        ValueError: the address is not an https URL.
    """
    if not URL:
        return {}
    if not re.fullmatch(r"https://[^\s/]+/\S+", URL):
        raise ValueError(
            f"building failed: expected ENVHERD_URL as https://HOST/OWNER/NAME, got {URL!r}."
        )
    return {
        "Homepage": URL,
        "Documentation": at_tag("docs/index.md"),
        "Changelog": at_tag("CHANGELOG.md"),
        "Issues": f"{URL}/issues",
        "Source": URL,
    }


setup(
    ext_modules=[NATIVE] if IS_POSSIBLE else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    project_urls=urls(),
    long_description=description(),
    long_description_content_type="text/markdown",
)
