"""The claims of docs/security.md: other users can open or connect to nothing, and no file is unpickled."""

import ast
import contextlib
import functools
import os
import pickle
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from envherd.executor import EnvError, ExecutorOptions, ParallelEnv
from envherd.workers import plain
from envherd.workers.guests.saving import snapshot
from envherd.workers.processes import descendants, parent_of
from envherd.workers.testing import CountingEnv
from tests.conftest import is_of_others
from tests.extras import needs, skip_without
from tests.faults.children import NOBODY, in_child
from tests.oracles.damaging import damaged

skip_without("gymnasium")

import gymnasium

ROOT = Path(__file__).parents[2]

#: File -> what it unpickles. No other file unpickles, and none unpickles data from files.
UNPICKLES = {
    "workers/messages.py": "what the parent sends to its own worker, over a socket without a name",
    "workers/build.py": "factories, which came with such a message",
    "workers/sending/registries.py": "registered names of envs, which came with such a message",
    "workers/sending/pickling.py": "the script's definitions, which came with such a message",
    "executor/facades/sb3/factory.py": "the same",
    "executor/facades/torchrl/worker.py": "the same; specs and odd leaves (facade of TorchRL)",
    "executor/pools/commands.py": "answers of workers, with options.infos='pickle'",
    "workers/guests/leased.py": "factories and calls, which came with such a message",
    "executor/guests/leases.py": "results of leases, and exceptions of their envs",
    "workers/infos.py": "infos of workers, with options.infos='pickle' (facades of Gymnasium and SB3)",
    "executor/facades/gymnasium/worker.py": "values of spaces that are no arrays (facade of Gymnasium)",
}


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


# ---- other users -------------------------------------------------------------------------------


def _pry(pids: list[int]) -> list[str]:
    """As another user, try every way to gain access; return those that worked."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    opened = []
    for pid in pids:
        for name in (
            "mem",
            "environ",
            "maps",
            *(f"fd/{fd}" for fd in range(1024)),
            *(f"map_files/{n}" for n in range(4)),
        ):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/{name}", "rb") as file,
            ):
                file.read(1)
                opened.append(f"{pid}/{name}")
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
            opened.append(f"signal to {pid}")
        with contextlib.suppress(OSError):
            opened.append(f"descriptors of {pid}: {os.listdir(f'/proc/{pid}/fd')}")
    return opened


def _inodes(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_finds_nothing_to_open():
    names = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", "/tmp", "/run")}
    with ParallelEnv(2, CountingEnv, num_workers=2) as env:
        env.rollout(3)
        pids = [
            pid
            for worker in env.statistics().workers
            for pid in descendants(worker.pid)
        ]
        pids.append(parent_of(pids[0]))  # their helper
        assert in_child(_pry, pids) == []
        assert len(env.rollout(2)) == 2
        new = {folder: set(os.listdir(folder)) - old for folder, old in names.items()}
        assert not [
            name
            for name in new.pop("/dev/shm")
            if "envherd-" in name and not is_of_others(name)
        ]
        others = "envherd-(?!fuzz|log)"  # of tests that run now
        assert not [
            name for found in new.values() for name in found if re.search(others, name)
        ]


@pytest.mark.slow
def test_shared_memory_has_no_name_and_belongs_to_the_user():
    before = set(os.listdir("/proc/self/fd"))
    with ParallelEnv(2, CountingEnv, num_workers=2) as env:
        data = env.rollout(3)
        shared = 0
        for fd in set(os.listdir("/proc/self/fd")) - before:
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if "memfd:envherd" in target:
                    shared += 1
                    assert "(deleted)" in target
                    assert os.fstat(int(fd)).st_nlink == 0  # no name anywhere
        assert shared >= 4  # the slab, and the logs
        maps = Path(f"/proc/{env.statistics().workers[0].pid}/maps").read_text()
        assert "envherd-slab" in maps
        assert "/dev/shm" not in maps
        assert len(data) == 2


@pytest.mark.slow
def test_no_port_is_open():
    with ParallelEnv(2, CountingEnv, num_workers=2) as env:
        env.reset()
        pids = [os.getpid(), *(worker.pid for worker in env.statistics().workers)]
        ours = _inodes(pids)
        assert ours
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[6] in ours:
                assert len(fields) == 7, f"a socket with a name: {line}"
                assert int(fields[3], 16) & 0x10000 == 0, (
                    f"a socket that listens: {line}"
                )
        for table in ("tcp", "tcp6", "udp", "udp6"):
            path = Path(f"/proc/net/{table}")
            for line in path.read_text().splitlines()[1:] if path.exists() else ():
                assert line.split()[9] not in _inodes(pids[1:])


# ---- modules -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["zygote", "spawn"])
def test_workers_import_no_modules_of_the_current_folder(
    script_host, tmp_path, start_method
):
    script, here = tmp_path / "script/script.py", tmp_path / "here"
    for folder in (script.parent, here):
        folder.mkdir()
    for name in ("json", "envherd", "numpy", "re"):
        (here / f"{name}.py").write_text("open('ran', 'w').close()")
    script.write_text(
        "from envherd import ExecutorOptions, ParallelEnv\n"
        "from envherd.workers.testing import CountingEnv\n"
        f"with ParallelEnv(1, CountingEnv, options=ExecutorOptions(start_method={start_method!r})) as env:\n"
        "    env.rollout(2)\n"
    )
    done = script_host.run(script, folder=here, output=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (here / "ran").exists()


# ---- pickles -----------------------------------------------------------------------------------


def test_only_listed_modules_unpickle():
    found = set()
    for path in (
        path
        for layer in ("shm", "workers", "executor")
        for path in (ROOT / layer).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            # Calls and other names for them, such as `loads = pickle.loads`.
            if isinstance(node, ast.Attribute) and node.attr in ("load", "loads"):
                of = getattr(node.value, "id", "")
                if of not in ("json", "tomllib", "plain", "suite", "native", "machine"):
                    found.add(path.relative_to(ROOT).as_posix())
    # Ray's own pickles: see the page.
    assert {name for name in found if "/cluster/" not in name} == set(UNPICKLES)


@pytest.mark.slow
def test_messages_of_workers_are_not_unpickled(tmp_path):
    with ParallelEnv(1, CountingEnv) as env:
        env.reset()
        # Downwards: our own code, for our own child.
        env.set("secret", Payload(tmp_path / "ran in the worker"))
        assert (tmp_path / "ran in the worker").exists()
        (tmp_path / "ran in the worker").unlink()
        with pytest.raises(EnvError, match='infos="pickle"'):
            env.get("echo")
        assert not list(tmp_path.iterdir())


#: Audit events of Python that no reader of a file may cause.
FORBIDDEN = frozenset(
    {
        *(
            "exec",
            "compile",
            "import",
            "pickle.find_class",
            "marshal.loads",
            "ctypes.dlopen",
            "subprocess.Popen",
        ),
        *(
            "os.system",
            "os.posix_spawn",
            "os.fork",
            "os.remove",
            "os.rename",
            "os.mkdir",
            "os.truncate",
        ),
        *("socket.__new__", "socket.connect", "socket.bind"),
    }
)


def _read_damaged(seed: int, num_cases: int) -> list[str]:
    """Read damaged states; return what was done that may not be, and errors of other kinds."""
    found: list[str] = []
    env = gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 2)
    env.reset(seed=1)
    state = snapshot.save(env)
    sound = plain.decode(state["held"])
    is_armed = False
    rng = random.Random(seed)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = (
            event == "open"
            and isinstance(arguments[1], str)
            and set(arguments[1]) & set("wax+")
        )
        if is_armed and (event in FORBIDDEN or is_write):
            found.append(f"{event} {arguments!r:.200}")

    sys.addaudithook(note)
    for _ in range(num_cases):
        held = plain.encode(damaged(sound, rng))
        forged = {**state, "held": held, "digest": snapshot._digest(held)}
        is_armed = True
        try:
            snapshot.read(env, forged)
        except ValueError as error:
            if "expected what state_dict() or save()" not in str(error):
                found.append(str(error))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        is_armed = False
    env.reset(seed=2)
    env.step(1)
    return found


@needs("gymnasium")
@pytest.mark.slow
def test_files_that_are_damaged_run_nothing_and_are_refused_in_one_way():
    assert in_child(_read_damaged, 0, 300) == []


@needs("gymnasium")
@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_damaged_checkpoints_change_nothing_and_lose_no_worker(seed):
    rng, refusals = random.Random(seed), []
    make = functools.partial(gymnasium.make, "CartPole-v1")
    with ParallelEnv(
        3, make, num_workers=2, seed=0, options=ExecutorOptions(isolate_rng=True)
    ) as env:
        env.rollout(3)
        saved, whole = env.save(), env.state_dict()
        pids = [worker.pid for worker in env.statistics().workers]
        for _ in range(60):
            for restore, state in ((env.restore, saved), (env.load_state_dict, whole)):
                env.step(env.rand_action(env.current()))
                before = env.current()
                try:
                    restore(damaged(state, rng))
                except ValueError as error:
                    refusals.append((str(error), bool((env.current() == before).all())))
                env.load_state_dict(whole)
        assert len(refusals) > 60
        assert all(
            " failed: expected " in words and is_same for words, is_same in refusals
        )
        assert [worker.pid for worker in env.statistics().workers] == pids


@needs("cli")
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["pkl", "pt"])
def test_the_command_line_never_unpickles_a_file(tmp_path, suffix):
    from typer.testing import CliRunner

    from envherd.executor.cli.app import app

    path = tmp_path / f"env.{suffix}"
    path.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    for name in (
        str(path),
        f"{path}:make",
        f"python:{path}",
        f"python:{path}:make",
        f"gymnasium:{path}",
    ):
        result = CliRunner().invoke(
            app, ["rollout", name, "--steps", "1", "--envs", "1"]
        )
        assert result.exit_code != 0
        assert not (tmp_path / "ran").exists()
