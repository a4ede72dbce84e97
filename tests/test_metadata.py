"""The metadata of a release has links that work on a package index; other builds need no repository address."""

import email
import os
import re
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

from tests.test_docs import LINK, ROOT
from tools.compat import GROUPS, RUN_ABOVE

URL = "https://git.example.org/owner/envherd"
CODE = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"


def build(folder: Path, url: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
    """Build the metadata for a repository address, from copies of the needed files in a folder."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    surroundings = {**os.environ, "ENVHERD_URL": url}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command,
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        check=False,
    )


def metadata(folder: Path, url: str) -> Message:
    done = build(folder, url)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.dist-info/METADATA")
    return email.message_from_string(found.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_with_an_address_every_link_and_picture_is_absolute_and_there(tmp_path):
    built = metadata(tmp_path, f"{URL}/")
    version = built["Version"]
    links = [
        link for link in LINK.findall(built.get_payload()) if not link.startswith("#")
    ]
    ours = [link for link in links if link.startswith(URL)]
    assert {link for link in links if not link.startswith("https://")} == set()
    for link in ours:
        kind, tag, path = re.fullmatch(
            rf"{URL}/(raw|blob)/(v[^/]+)/([^#]+)(?:#.*)?", link
        ).groups()
        assert (kind == "raw", tag) == (path.endswith(".png"), f"v{version}")
        assert (ROOT / path).is_file(), link
    relative = [
        link
        for link in LINK.findall((ROOT / "README.md").read_text())
        if not re.match(r"#|\w+:", link)
    ]
    assert len(ours) == len(relative)
    assert any("speed_dark.png" in link for link in ours), "the srcset of a picture"
    assert f"git clone {URL} " in built.get_payload()
    named = dict(line.split(", ") for line in built.get_all("Project-URL"))
    assert named.keys() == {
        "Homepage",
        "Documentation",
        "Changelog",
        "Issues",
        "Source",
    }
    assert all(link.startswith(URL) for link in named.values())


@pytest.mark.slow
def test_without_an_address_the_readme_is_unchanged(tmp_path):
    built = metadata(tmp_path, "")
    assert built.get_payload() == (ROOT / "README.md").read_text()
    assert built.get_all("Project-URL") is None


@pytest.mark.slow
def test_an_address_that_is_not_https_is_refused(tmp_path):
    urls = [
        "http://git.example.org/owner/envherd",
        "git@example.org:owner/envherd",
        "https://",
    ]
    tries = f"""
import os
for url in {urls!r}:
    os.environ["ENVHERD_URL"] = url
    try:
        {CODE}
    except ValueError as error:
        print(error)
"""
    printed = build(tmp_path, "", tries).stdout
    for url in urls:
        refusal = f"building failed: expected ENVHERD_URL as https://HOST/OWNER/NAME, got {url.rstrip('/')!r}."
        assert refusal in printed


@pytest.mark.parametrize(
    "pattern",
    [*RUN_ABOVE, *(pattern for patterns in GROUPS.values() for pattern in patterns)],
)
def test_the_tests_for_other_versions_of_the_libraries_exist(pattern):
    assert list((ROOT / "tests").glob(pattern)), (
        f"tools.compat runs tests/{pattern}, which is not there"
    )
