"""Install dm-meltingpot into the environment of the Python that runs this, with or without its bots' models.

dm-meltingpot is published as source only, and building it downloads an archive with the models of its bots. Scenarios
need those models; substrates do not. So this tries, in this order:

1. pip's own build (from pip's cache, if a good build is in there), which downloads the archive;
2. a build with an archive that holds an empty directory where the models would be: every substrate works, scenarios do
   not, and the last line printed says so.

Guarantees: never waits for a download that has stopped (60 s without a byte; 30 minutes in all); uses a private TMPDIR,
so that no later build finds half an archive, or an empty one; never leaves a build without models in pip's cache. An
archive in the usual temporary directory, put there by hand, is used. Needs pip and the standard library alone, also
without envherd: `python envherd/install_meltingpot.py`.

TensorFlow stays a dependency although it is 570 MB to download, 1.9 GB on disk and 20 s to install, and no substrate
needs it: `import meltingpot` imports it on its first lines, so that without it neither `from meltingpot import
substrate` in a user's script nor TorchRL's MeltingpotEnv would work. Workers that run substrates never load it.

python -m envherd.install_meltingpot     # -c constraints.txt in a checkout
pip install "envherd[meltingpot]"        # what it requires
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

REQUIREMENT = "dm-meltingpot"
#: What dm-meltingpot 2.4.1 looks for in the temporary directory before it downloads.
ARCHIVE = "meltingpot-assets-2.3.0.tar.gz"
MODELS = "meltingpot/assets/saved_models/"
STALL_S = 60.0
LIMIT_S = 1800.0
POLL_S = 1.0


class BuildFailed(Exception):
    """A build ended without a wheel; the text is the end of what it printed."""


def main() -> int:
    """Build and install dm-meltingpot unless it is installed; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m envherd.install_meltingpot",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument(
        "-c",
        "--constraint",
        type=Path,
        help="pip constraints file with the pin; without it, the newest version",
    )
    constraint = parser.parse_args().constraint
    if is_installed(constraint):
        report(has_models=installed_models())
        return 0
    with private_tmpdir() as tmpdir:
        try:
            wheel = build_best(constraint, tmpdir)
        except BuildFailed as error:
            print(
                f"{error}\nBuilding {REQUIREMENT} failed; see above.", file=sys.stderr
            )
            return 1
        pip("install", "--quiet", "--no-deps", str(wheel))
    report(has_models=installed_models())
    return 0


def is_installed(constraint: Path | None) -> bool:
    """Tell whether the version that the constraints ask for (any, without a pin) is installed."""
    try:
        version = importlib.metadata.version(REQUIREMENT)
    except importlib.metadata.PackageNotFoundError:
        return False
    pins = [
        line.split("==")[1].strip()
        for line in (constraint.read_text().splitlines() if constraint else ())
        if line.startswith(f"{REQUIREMENT}==")
    ]
    return not pins or pins[0] == version


def installed_models() -> bool:
    """Tell whether the installed package has the bots' models."""
    files = importlib.metadata.files(REQUIREMENT) or []
    return any(str(file).startswith(MODELS) for file in files)


def report(*, has_models: bool) -> None:
    """Print on one line what this installation can do."""
    version = importlib.metadata.version(REQUIREMENT)
    if has_models:
        print(f"{REQUIREMENT} {version}: substrates and scenarios")
        return
    print(
        f"{REQUIREMENT} {version}: substrates only. Scenarios are OFF, because their bots' models could not be "
        f"downloaded here. To have them: put {ARCHIVE}, whose address is in dm-meltingpot's setup.py, into "
        f"{tempfile.gettempdir()}, `{sys.executable} -m pip uninstall {REQUIREMENT}`, and run this again."
    )


def build_best(constraint: Path | None, tmpdir: Path) -> Path:
    """Return a wheel with the models if one can be had, else one without.

    Raises:
        BuildFailed: not even the build without models worked.
    """
    supplied = Path(tempfile.gettempdir(), ARCHIVE)
    if supplied.is_file():
        (tmpdir / ARCHIVE).symlink_to(supplied)
    # A wheel without models in pip's cache (made by another program) is worth a second try past the cache.
    for cache, where in (([], ""), (["--no-cache-dir"], ", past pip's cache")):
        print(f"building {REQUIREMENT} with its bots' models{where}", flush=True)
        try:
            wheel = build(constraint, tmpdir, cache)
        except BuildFailed as error:
            print(f"no models: {str(error).strip().splitlines()[-1]}", flush=True)
            break
        if wheel_has_models(wheel):
            return wheel
    print(f"building {REQUIREMENT} without models", flush=True)
    write_empty_archive(tmpdir / ARCHIVE)
    return build(constraint, tmpdir, ["--no-cache-dir"])


def wheel_has_models(wheel: Path) -> bool:
    """Tell whether a wheel has the bots' models."""
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith(MODELS) for name in archive.namelist())


def write_empty_archive(path: Path) -> None:
    """Write the smallest archive that the build accepts: an empty directory `assets`."""
    path.unlink(missing_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        directory = tarfile.TarInfo("assets")
        directory.type = tarfile.DIRTYPE
        directory.mode = 0o755
        archive.addfile(directory)


def build(constraint: Path | None, tmpdir: Path, options: list[str]) -> Path:
    """Run `pip wheel` under a watch and return the wheel.

    Raises:
        BuildFailed: it ended with an error, or nothing moved for `STALL_S`, or it took `LIMIT_S`.
    """
    out = Path(tempfile.mkdtemp(dir=tmpdir))
    log = out / "pip.log"
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--wheel-dir",
        str(out),
    ]
    pins = ["--constraint", str(constraint)] if constraint else []
    command += [*pins, *options, REQUIREMENT]
    environment = {
        **os.environ,
        "TMPDIR": str(tmpdir),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=environment,
            start_new_session=True,
        )
        try:
            watch(process, tmpdir)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise BuildFailed(reason_in(log.read_text(errors="replace")))
    return next(out.glob("*.whl"))


def watch(process: subprocess.Popen[bytes], tmpdir: Path) -> None:
    """Wait for a build to end, as long as files below `tmpdir` grow.

    Raises:
        BuildFailed: nothing moved for `STALL_S`, or it took `LIMIT_S`.
    """
    start = moved = time.monotonic()
    size = -1
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return
        now = time.monotonic()
        latest = size_below(tmpdir)
        if latest != size:
            size, moved = latest, now
        if now - moved > STALL_S:
            raise BuildFailed(f"the download stood still for {STALL_S:.0f} s")
        if now - start > LIMIT_S:
            raise BuildFailed(f"the build took more than {LIMIT_S:.0f} s")


def size_below(directory: Path) -> int:
    """Return the bytes in the files below a directory, as far as they can be read."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def reason_in(log: str) -> str:
    """Return the end of a build log, without pip's epilogue where there is one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    end = lines.index("[end of output]") if "[end of output]" in lines else len(lines)
    return "\n".join(lines[max(0, end - 20) : end])


@contextlib.contextmanager
def private_tmpdir() -> Iterator[Path]:
    """Make a temporary directory that no other program uses, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="envherd-build-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def pip(*arguments: str) -> None:
    """Run pip in this environment; its errors are for the reader to see."""
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        check=True,
    )


if __name__ == "__main__":
    sys.exit(main())
