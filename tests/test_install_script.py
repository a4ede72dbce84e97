"""The script that installs Melting Pot: its build tools, and its time limits."""

import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.extras import needs

SCRIPT = Path(__file__).parents[1] / "envherd" / "install_meltingpot.py"


@pytest.fixture(scope="module")
def script():
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("install_meltingpot", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wheel(path: Path, *files: str) -> Path:
    """Write a zip file with some empty files in it."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.writestr(file, "")
    return path


def test_the_empty_archive_has_the_directory_that_the_build_looks_for(script, tmp_path):
    script.write_empty_archive(tmp_path / script.ARCHIVE)
    with tarfile.open(tmp_path / script.ARCHIVE) as archive:
        (member,) = archive.getmembers()
    assert (member.name, member.isdir()) == ("assets", True)


def test_a_supplied_archive_survives_the_build_without_models(script, tmp_path):
    supplied = tmp_path / "theirs.tar.gz"
    supplied.write_bytes(b"models")
    (tmp_path / script.ARCHIVE).symlink_to(supplied)
    script.write_empty_archive(tmp_path / script.ARCHIVE)
    assert supplied.read_bytes() == b"models"


def test_wheels_with_and_without_models_are_distinguished(script, tmp_path):
    assert script.wheel_has_models(
        write_wheel(
            tmp_path / "a.whl", "meltingpot/assets/saved_models/x/saved_model.pb"
        )
    )
    assert not script.wheel_has_models(
        write_wheel(tmp_path / "b.whl", "meltingpot/__init__.py", "meltingpot/assets/")
    )


WRITES = (
    "import sys, time\nwhile True: open(sys.argv[1], 'a').write('x'); time.sleep(0.01)"
)


@pytest.mark.parametrize(
    ("limit", "code", "message"),
    [
        (("STALL_S", 0.1), "import time; time.sleep(60)", "stood still"),
        (("LIMIT_S", 0.15), WRITES, "took more than"),  # it moves for ever
    ],
)
def test_a_build_that_does_not_end_is_given_up(
    script, tmp_path, monkeypatch, limit, code, message
):
    monkeypatch.setattr(script, *limit)
    monkeypatch.setattr(script, "POLL_S", 0.02)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "download")])
    try:
        with pytest.raises(script.BuildFailed, match=message):
            script.watch(process, tmp_path)
    finally:
        process.kill()
        process.wait()


def test_a_build_that_ends_is_not_waited_for(script, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    script.watch(process, tmp_path)
    assert process.returncode == 0


def test_the_reason_is_the_last_line_of_the_builds_own_output(script):
    log = """
      downloading assets...
      error: <urlopen error [Errno -2] Name or service not known>
      [end of output]

      note: This error originates from a subprocess, and is likely not a problem with pip.
    ERROR: Failed to build one or more wheels
    """
    assert (
        script.reason_in(log).splitlines()[-1]
        == "error: <urlopen error [Errno -2] Name or service not known>"
    )


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ("dm-meltingpot==0.0.1\n", False),
        pytest.param("numpy==2.0\n", True, marks=needs("meltingpot")),
    ],
    ids=["another version is pinned", "no pin"],
)
def test_only_the_pinned_version_counts_as_installed(script, tmp_path, pins, expected):
    constraint = tmp_path / "constraints.txt"
    constraint.write_text(pins)
    assert script.is_installed(constraint) is expected


@needs("meltingpot")
@pytest.mark.parametrize(
    "pins", [[], ["-c", str(SCRIPT.parents[1] / "constraints.txt")]]
)
def test_what_is_installed_is_not_built_again(pins):
    printed = subprocess.check_output(
        [sys.executable, "-m", "envherd.install_meltingpot", *pins], text=True
    )
    assert re.match(r"dm-meltingpot [\d.]+: substrates", printed)
