"""Check that every test leaves no processes, descriptors, threads, /dev/shm entries or signal handlers.

This process adopts orphans, so it sees and kills helpers and workers that outlive their owner.
"""

import collections
import contextlib
import gc
import math
import multiprocessing.resource_tracker
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

import envherd.workers.adapters.light_tensorboard  # noqa: F401  # before a test imports Stable-Baselines3
from envherd.shm import platforms
from envherd.shm.segment import NAMES
from envherd.workers import processes
from tests.scale import IS_FULL, SEED, seed
from tests.script_host import ScriptHost, adopt_orphans

#: Seconds for processes to end, and for a teardown: well above the promised one second, also on a busy machine.
_GRACE_S, _TEARDOWN_S = 8.0, 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR2)
#: Files that one process runs because they share what takes seconds to start: a Ray cluster, a helper that has imported
#: TorchRL.
_TOGETHER = {
    "tests/cluster": ("tests/cluster/",),
    "TorchRL": (
        "tests/executor/facades/test_torchrl_",
        "tests/executor/facades/test_faults.py",
    ),
}
#: Groups and files that take long and so begin first: if a long one began last, the other processes would wait for it.
_LONG = (
    *_TOGETHER,
    "tests/test_docs.py",
    "tests/test_examples.py",
    "tests/workers/test_native.py",
    "tests/workers/test_torchrl_direct.py",
    "tests/faults/test_executor_model.py",
    "tests/faults/test_interrupts.py",
    "tests/executor/protocol/test_property.py",
    "tests/executor/pools/test_shared_helpers.py",
    "tests/contracts/test_matrix.py",
    "tests/executor/sizing/test_sizing_runs.py",
    "tests/workers/test_meltingpot.py",
    "tests/workers/test_together.py",
    "tests/faults/test_fuzz.py",
)
#: Modules that a session's helper has imported.
_PRELOADED = (
    "torch",
    "tensordict",
    "gymnasium",
    "pytest",
    "hypothesis",
    "envherd.executor",
    "envherd.workers.testing",
)
#: Tests that start no executors in this process, or few.
_WITHOUT_HELPER = ("tests/cluster/", "tests/benchmarks/", "tests/shm/", "tests/test_")
#: Descriptors that libraries open once and keep.
_KEPT_OPEN = ("/dev/urandom", "/dev/null", "/dev/dri", "/dev/nvidia")

# Until all tests are collected: makes their imports a tenth faster.
gc.disable()
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")


@pytest.hookimpl(trylast=True)  # pytest-randomly has chosen the seed by then
def pytest_configure(config: pytest.Config) -> None:
    """Adopt orphans of tests' processes, let Ctrl-C through, and keep the run's seed for sweeps.

    A background job of a shell ignores Ctrl-C, and so do its descendants. Python's resource tracker and the lock of
    progress bars are created before any test, because they live as long as the process.
    """
    multiprocessing.resource_tracker.ensure_running()
    with contextlib.suppress(ModuleNotFoundError):
        import tqdm

        tqdm.tqdm.get_lock()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    adopt_orphans(is_on=True)
    os.environ[SEED] = str(config.getoption("randomly_seed", 0))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip sweeps and leave out parts of them except in full runs; move long tests to the front after shuffling."""
    are_named = any("::" in argument for argument in config.args)
    if not (IS_FULL or are_named or os.environ.get("ENVHERD_UNSAMPLED")):
        left_out = _left_out(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("full") and not IS_FULL:
            item.add_marker(
                pytest.mark.skip(reason="a sweep: make test-full (ENVHERD_FULL=1)")
            )
    groups = {item: _group(item.nodeid) for item in items}
    items.sort(
        key=lambda item: (
            _LONG.index(groups[item]) if groups[item] in _LONG else len(_LONG)
        )
    )


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases of tests marked `sampled(stride)` that this run leaves out: all but one of `stride`.

    They are drawn, because each n-th case of a product of parameters may have the same value of one of them.
    """
    cases = collections.defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):
        for mark in item.iter_markers("sampled"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    left_out = {item for found in cases.values() for item in found}
    for (name, stride), found in cases.items():
        draw = random.Random(f"{seed()} {name}")
        left_out.difference_update(draw.sample(found, math.ceil(len(found) / stride)))
    return left_out


def pytest_collection_finish() -> None:
    """Leave what is imported by now to no garbage collection: one over all of it takes most of a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one process, and so the files of a group, to share their fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


def _group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next(
        (name for name, files in _TOGETHER.items() if file.startswith(files)), file
    )


def _children() -> set[int]:
    """Return the pids of this process's living children, adopted ones too."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return {pid for pid in found if not _has_ended(pid)}


def _has_ended(pid: int) -> bool:
    """Return whether a process is gone or waits to be reaped (adopted orphans do)."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
    return True


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def descendants() -> set[int]:
    """Return the pids of all running descendants of this process."""
    return {
        pid for pid in processes.descendants(os.getpid())[1:] if not _has_ended(pid)
    }


def command(pid: int | str) -> str:
    """Return a process's command line."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    return "(gone)"


def is_of_others(name: str) -> bool:
    """Return whether a name in /dev/shm is of `multiprocessing`, or has the id of another process."""
    is_ours = name.startswith(f"{NAMES}{os.getpid()}-")
    return name.startswith(("psm_", "sem.mp-", NAMES)) and not is_ours


def shm_names() -> set[str]:
    """Return the names in /dev/shm that this process may have made."""
    return {name for name in os.listdir("/dev/shm") if not is_of_others(name)}


def gained_shm_names(before: set[str]) -> set[str]:
    """Return the names in /dev/shm that this process has made since `shm_names()` was `before`."""
    return _not_of_others(shm_names() - before)


def _not_of_others(names: set[str]) -> set[str]:
    """Return the names in /dev/shm that only this process and its children have mapped, or no process.

    The creator of a name is unknown, and other processes (tests that run at the same time) create some too. Mappings
    are compared by inode, because a semaphore is mapped under a temporary name.
    """
    names = {name for name in names if not is_of_others(name)}
    if not names:
        return names
    ours = {
        os.getpid(),
        *(child.pid for child in psutil.Process().children(recursive=True)),
    }
    theirs: set[int] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            maps = "" if pid in ours else Path(f"/proc/{pid}/maps").read_text()
            theirs.update(
                int(line.split()[4])
                for line in maps.splitlines()
                if "/dev/shm/" in line
            )
    return {name for name in names if _inode(name) not in theirs}


def _inode(name: str) -> int:
    """Return the inode of a name in /dev/shm; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return (Path("/dev/shm") / name).stat().st_ino
    return 0


def _is_pool(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to a library's pool that lives as long as the process."""
    return thread.name.startswith(("asyncio_", "ThreadPoolExecutor-", "pytest_timeout"))


@dataclass
class Possessions:
    """The resources of this process now."""

    children: set[int] = field(default_factory=_children)
    descriptors: dict[int, str] = field(default_factory=_descriptors)
    threads: set[int] = field(
        default_factory=lambda: {id(thread) for thread in threading.enumerate()}
    )
    shm: set[str] = field(default_factory=lambda: set(os.listdir("/dev/shm")))
    handlers: dict[int, Any] = field(
        default_factory=lambda: {
            number: signal.getsignal(number) for number in _SIGNALS
        }
    )
    blocked: set[int] = field(
        default_factory=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())
    )
    folder: str = field(default_factory=os.getcwd)
    has_grad: bool = field(
        default_factory=lambda: (
            "torch" not in sys.modules or sys.modules["torch"].is_grad_enabled()
        )
    )

    def gained(self) -> list[str]:
        """Return the resources that were gained since."""
        now = Possessions()
        return [
            *(
                f"process {pid}: {command(pid)[:200]}"
                for pid in sorted(now.children - self.children)
            ),
            *(
                f"descriptor {fd}: {target}"
                for fd, target in now.descriptors.items()
                if self.descriptors.get(fd) != target
                and not target.startswith(_KEPT_OPEN)
            ),
            *(
                f"thread {t.name}"
                for t in threading.enumerate()
                if id(t) not in self.threads and not _is_pool(t)
            ),
            *(
                f"/dev/shm/{name}"
                for name in sorted(_not_of_others(now.shm - self.shm))
            ),
            *(
                f"handler of signal {n}"
                for n, handler in now.handlers.items()
                if handler != self.handlers[n]
            ),
            *(f"blocked signal {n}" for n in sorted(now.blocked - self.blocked)),
            *(["torch without gradients"] if now.has_grad != self.has_grad else []),
            *([f"current folder {now.folder}"] if now.folder != self.folder else []),
        ]


@pytest.fixture(autouse=True, scope="session")
def _the_gpu_is_in_use() -> None:
    """Create this process's CUDA context, which stays, before a test looks for what is left behind."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.zeros(1, device="cuda").sum().item()


@pytest.fixture(scope="session")
def _helper_of(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[tuple[str, ...]], Any]]:
    """Return a function that returns the session's helper, which has imported the modules of most tests.

    With the arguments of a mark `preloads(...)`, the helper has also imported these modules, and those with this mark.
    """
    from envherd.executor import preloaded
    from envherd.executor.start import zygote

    made: dict[tuple[str, ...], Any] = {}

    def helper_of(modules: tuple[str, ...]) -> Any:
        if modules not in made:
            items: list[Any] = request.session.items
            marked = {
                item.module.__name__
                for item in items
                if _preloads(item.parent) == modules
            }
            stack.enter_context(
                preloaded(*_PRELOADED, *modules, *sorted(marked), "tests.huge_pages")
            )
            # Modules put it back for themselves.
            made[modules] = zygote._open.popitem()
        return made[modules]

    with contextlib.ExitStack() as stack:
        yield helper_of
        zygote._open.update(made.values())


def _preloads(node: pytest.Item | pytest.Collector | None) -> tuple[str, ...] | None:
    """Return the arguments of the mark `preloads` of a node's module; None if it has none."""
    module = None if node is None else node.getparent(pytest.Module)
    marks = () if module is None else module.own_markers
    return next((mark.args for mark in marks if mark.name == "preloads"), None)


@pytest.fixture(autouse=True, scope="module")
def _shared_helper(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the executors of many test modules share a helper: workers that import torch by themselves start in seconds.

    Modules that are marked `preloads(...)` share one with more modules. There is none where `tests/lacking` takes away
    what helpers need.
    """
    modules = _preloads(request.node)
    if platforms.missing() or (
        modules is None and request.node.nodeid.startswith(_WITHOUT_HELPER)
    ):
        yield
    else:
        from envherd.executor.start import zygote

        helper_of = request.getfixturevalue("_helper_of")
        zygote._open.update([helper_of(modules or ())])
        yield
        zygote._open.popitem()


@pytest.fixture(scope="session")
def script_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptHost]:
    """Return the host of scripts, with this process's module path and one thread for torch."""
    path = os.pathsep.join(map(str, [Path(__file__).parents[1], *sys.path]))
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of the whole run
    with contextlib.closing(
        ScriptHost(folder, {"OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    ) as host:
        yield host


@pytest.fixture
def run_example(
    script_host: ScriptHost, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """Return a function that runs an example in an empty folder, checks its exit code, and returns its output."""

    def run(name: str, *arguments: str, timeout_s: float = 240) -> str:
        folder, output = (
            tmp_path_factory.mktemp("folder"),
            tmp_path_factory.mktemp("output"),
        )
        script = Path(__file__).parents[1] / "examples" / f"{name}.py"
        done = script_host.run(
            script, *arguments, folder=folder, output=output, timeout_s=timeout_s
        )
        assert done.returncode == 0, (
            f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        assert list(folder.iterdir()) == [], "an example leaves nothing behind"
        return done.stdout

    return run


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Let torch compute on one thread, as small models do it fastest."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executors of the test start their helper, as in users' programs."""
    from envherd.executor.start import zygote

    monkeypatch.setattr(zygote, "_open", {})


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves anything behind; kill the processes that it left."""
    before = Possessions()
    yield
    helpers = sys.modules.get("envherd.executor.start.zygote")
    if helpers is not None:
        helpers.end_idle()
    gained = before.gained()
    if gained:
        gc.collect()
        gained = before.gained()
    end = time.monotonic() + _GRACE_S
    while gained and time.monotonic() < end:
        time.sleep(0.02)
        gained = before.gained()
    for pid in _children() - before.children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if gained:
        pytest.fail("the test left behind:\n  " + "\n  ".join(gained))


@pytest.fixture(autouse=True)
def _loses_no_worker(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that loses a worker without being marked `broken_pool`."""
    supervisor = sys.modules.get("envherd.executor.processes.supervisor")
    if supervisor is None or request.node.get_closest_marker("broken_pool"):
        yield
        return
    lost: list[str] = []
    declare_lost = supervisor.Supervisor.declare_lost

    def declare(self: Any, worker_id: int, error: Exception) -> None:
        lost.append(str(error))
        declare_lost(self, worker_id, error)

    monkeypatch.setattr(supervisor.Supervisor, "declare_lost", declare)
    yield
    assert not lost, (
        "the test lost a worker; mark it `broken_pool` if it means to:\n"
        + "\n".join(lost)
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fail a teardown that takes too long: closing is bounded."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < _TEARDOWN_S, f"the teardown took {took:.1f} s"
