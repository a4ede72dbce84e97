"""The table "What a worker has of its script" of docs/custom_envs.md, row by row; and programs of all kinds."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from multiprocessing import reduction
from pathlib import Path

import pytest

from envherd.executor import ExecutorOptions, ParallelEnv
from envherd.workers.errors import FactoryError
from envherd.workers.sending.sharing import sharing
from envherd.workers.testing import CountingEnv

SCRIPT = """
import functools, json, logging, os, random, signal, sys, threading, warnings
import gymnasium, numpy as np, torch
from envherd import ExecutorOptions, ParallelEnv
import imported, registering

counter = {"built": 0}
handler = logging.StreamHandler()

@functools.lru_cache
def cached(n):
    return n + 1

cached(1)

def descriptors():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        counter["built"] += 1
        self.seen = {
            "variable": counter["built"],
            "cache": cached.cache_info().currsize,
            "module": imported.VALUE,
            "registered": "FromImport-v0" in gymnasium.registry,
            "changed by an import": getattr(gymnasium, "changed_by_import", None),
            "path": "/somewhere/else" in sys.path,
            "folder": os.getcwd(),
            "before": os.environ.get("BEFORE"),
            "after": os.environ.get("AFTER"),
            "filters": any(one[2] is ImportWarning and one[0] == "error" for one in warnings.filters),
            "seterr": np.geterr()["divide"],
            "handlers": len(logging.getLogger("mine").handlers),
            "random": random.random(),
            "threads": threading.active_count(),
            "sigusr1": signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL,
            "file": any(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == "script.py" for fd in descriptors()),
            "script": hasattr(sys.modules["__main__"], "counter"),
        }

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, "float32"), {}

    def step(self, action):
        return np.zeros(1, "float32"), 0.0, False, False, {}

    def dtype(self):
        import torch
        return str(torch.get_default_dtype())

if __name__ == "__main__":
    sys.path.append("/somewhere/else")
    os.environ["BEFORE"] = "set"
    warnings.simplefilter("error", ImportWarning)
    np.seterr(divide="raise")
    torch.set_default_dtype(torch.float64)
    logging.getLogger("mine").addHandler(handler)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    random.seed(0)
    number = os.open("script.py", os.O_RDONLY)
    options = ExecutorOptions(on_worker_loss="restart", infos="plain")
    with ParallelEnv(2, Env, num_workers=1, options=options) as env:
        env.reset()
        os.environ["AFTER"] = "set"
        first = env.get("seen")
        os.kill(env.statistics().workers[0].pid, signal.SIGKILL)
        env.reset()
        env.reset()
        answer = {"first": first, "replaced": env.get("seen"), "dtype": env.call("dtype"), "own": random.random()}
        print(json.dumps(answer))
"""


def run(script_host, folder, *command):
    """Run a script in a folder; return the lines of its output, each read as JSON."""
    done = script_host.run(*command, folder=folder, output=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def seen(tmp_path_factory, script_host):
    """Run a script; return what its workers saw."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "imported.py").write_text("VALUE = 'imported'\n")
    (folder / "registering.py").write_text(
        textwrap.dedent("""
        import gymnasium
        gymnasium.register("FromImport-v0", entry_point="imported:VALUE")
        gymnasium.changed_by_import = True
        """)
    )
    (answer,) = run(script_host, folder, "script.py")
    return {**answer, "folder": str(folder)}


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("cache", 0),
        ("module", "imported"),
        ("registered", True),
        ("changed by an import", None),
        ("path", True),
        ("before", "set"),
        ("after", None),
        ("filters", False),
        ("seterr", "warn"),
        ("handlers", 0),
        ("threads", 1),
        ("sigusr1", False),
        ("file", False),
        ("script", True),
    ],
)
def test_worker_has_the_scripts_surroundings(seen, what, expected):
    values = [one[what] for one in seen["first"] + seen["replaced"]]
    assert values == [expected] * 4


def test_worker_has_copies_of_variables_and_the_folder_of_the_script(seen):
    assert [one["variable"] for one in seen["first"]] == [1, 2]  # one copy in a worker
    assert [one["variable"] for one in seen["replaced"]] == [1, 2]

    assert {one["folder"] for one in seen["first"] + seen["replaced"]} == {
        seen["folder"]
    }
    # Not that of the script.
    assert set(seen["dtype"]) == {"torch.float32"}


def test_global_generators_are_seeded_for_each_env(seen):
    first, replaced = (
        [one["random"] for one in part] for part in (seen["first"], seen["replaced"])
    )
    assert first[0] != first[1]
    assert seen["own"] not in first
    assert len(set(replaced)) == 2


# ---- what multiprocessing gives to a process that it spawns -------------------------------------

LOOKING = """
import gc, json, logging, multiprocessing, os, re, sys
from multiprocessing import process, util
from worlds import World

def look():
    own, script = multiprocessing.current_process(), sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "environ": os.environ.get("SET"),
        "first_folder": process.ORIGINAL_DIR,
        "authkey": own.authkey.hex(),
        "name": re.sub("[A-Z]?[a-z-]*", "", own.name),
        "start_method": multiprocessing.get_start_method(),
        "log": [util.get_logger().level, util._log_to_stderr],
        "script": [script.__file__, script.__doc__, script is sys.modules["__mp_main__"]],
        "flags": [*sys.flags, sys.warnoptions, sys._xoptions],
    }

class Seeing(World):
    def reset(self, **_):
        self.seen = look()
        return super().reset()

def child(queue):
    queue.put(look())

if __name__ == "__main__":
    from envherd import ExecutorOptions, ParallelEnv  # here: spawned processes run this file
    sys.argv.append("later")
    sys.path.append("/somewhere/else")
    os.environ["SET"] = "1"
    multiprocessing.process.current_process().authkey = b"own"
    multiprocessing.set_start_method("spawn")
    util.get_logger().setLevel(logging.ERROR)
    os.chdir(os.path.dirname(os.getcwd()))
    queue = multiprocessing.Queue()
    spawned = multiprocessing.Process(target=child, args=(queue,))
    spawned.start()
    looks = {"multiprocessing": queue.get()}
    spawned.join()
    for method in ("zygote", "spawn", "portable"):
        with ParallelEnv(1, Seeing, options=ExecutorOptions(start_method=method, infos="plain")) as env:
            env.reset()
            looks[method] = env.get("seen")[0]
    print(json.dumps(looks))
    gc.freeze()  # the end of the script would take a second to collect what was imported
"""
#: Of the programs below, next to them.
WORLDS = """
import gymnasium, json, numpy as np

class World(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    value = 0.0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, "float32"), {}

    def step(self, action):
        value = self.value
        return np.zeros(1, "float32"), float(value() if callable(value) else value), False, False, {}

def rewards(make_env, n=2, each=lambda env: None, **options):
    import torch  # here, because workers import this module also
    from envherd import ExecutorOptions, ParallelEnv
    with ParallelEnv(n, make_env, num_workers=1, options=ExecutorOptions(**options)) as env:
        env.reset()
        each(env)
        root = env.reset()
        root["action"] = torch.zeros(n, dtype=torch.int64)
        return env.step(root)["next", "reward"].flatten().tolist()

def show(*args, **kwargs):
    print(json.dumps(rewards(*args, **kwargs)), flush=True)
"""


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looking")
    (folder / "looking.py").write_text(LOOKING)
    (folder / "worlds.py").write_text(WORLDS)
    printed = subprocess.check_output(
        [
            sys.executable,
            "-O",
            "-W",
            "error::ImportWarning",
            "-X",
            "utf8",
            "looking.py",
            "--level",
            "3",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        timeout=200,
    )
    return json.loads(printed)


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["zygote", "spawn", "portable"])
def test_it_is_what_multiprocessing_gives_to_a_spawned_process(looks, start_method):
    expected = {**looks["multiprocessing"], "name": "0"}  # envherd-worker-0
    assert looks[start_method] == expected
    assert expected["argv"][1:] == ["--level", "3", "later"]


# ---- programs -----------------------------------------------------------------------------------

DEFINITIONS = '''
from __future__ import annotations
import collections, concurrent.futures, dataclasses, enum, multiprocessing, pickle, sys, typing
from worlds import World, show

LEVEL = 5

@dataclasses.dataclass
class Record:
    x: int

class InFile:
    def __init__(self):
        self.level = LEVEL

class Outer:
    class Inner: ...

Colour = enum.Enum("Colour", "RED GREEN")
Point = collections.namedtuple("Point", "x y")

def double(x):
    return 2 * x

def renewed(record):
    return dataclasses.replace(record, x=double(record.x))

class Env(World):
    made = 0

    def __init__(self):
        Env.made += 1

    def value(self):
        script = sys.modules["__main__"]
        assert typing.get_type_hints(Record)["x"] is int
        record = pickle.loads(pickle.dumps(Record(7)))
        assert type(record) is Record is script.Record
        with open("objects", "rb") as file:
            objects = pickle.load(file)
        assert type(objects[0]) is InFile is script.InFile and objects[1:3] == [Colour.GREEN, Point(1, 2)]
        assert objects[1] is Colour.GREEN and type(objects[3]) is Outer.Inner and objects[0].level == script.LEVEL == 5
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                assert pool.map_async(double, [3]).get(60) == [6]
                assert type(pool.apply_async(renewed, [Record(1)]).get(60)) is Record
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            assert pool.submit(double, 4).result() == 8
        try:
            script.missing
        except AttributeError as error:
            assert "workers do not run the script" in str(error)
        return record.x + 10 * Env.made

with open("objects", "wb") as file:
    pickle.dump([InFile(), Colour.GREEN, Point(1, 2), Outer.Inner()], file)
show([lambda: Env(), lambda: Env()])

class Record(Record):
    """As in a notebook, another version."""
    y = 1

show(lambda: Env())
'''
MODULES = """
import importlib.util, os, runpy, sys, threading, types
from worlds import World, rewards

SOURCE = '''
import pickle, worlds
VALUE = %d
class Env(worlds.World):
    def value(self):
        return pickle.loads(pickle.dumps(Env)) is Env and VALUE
def make():
    return Env()
'''
found = {}

def write(name, value):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "w") as file:
        # Sizes differ, as Python takes bytecode to be fresh if a file has the size and the second of the former one.
        file.write(SOURCE % value + "#" * value)

def note(name, module):
    found[name] = [*rewards(module.make, 1), *rewards(lambda: module.make(), 1)]

write("gone/path_removed.py", 1)
sys.path.insert(0, "gone")
import path_removed
sys.path.remove("gone")
note("path removed", path_removed)

write("a/shadowed.py", 2)
write("b/shadowed.py", 0)
sys.path.insert(0, os.path.abspath("a"))
import shadowed
sys.path.insert(0, os.path.abspath("b"))
note("shadowed", shadowed)

made = types.ModuleType("made")
exec(SOURCE % 3, vars(made))
sys.modules["made"] = made
note("made", made)

write("edited.py", 0)
import edited
write("edited.py", 4)
importlib.reload(edited)
note("reloaded", edited)

write("deleted.py", 5)
import deleted
os.remove("deleted.py")
note("deleted", deleted)

for name, number in (("by-file.py", 6), ("package/__init__.py", 0), ("elsewhere.py", 7)):
    write(name, number)
import package
for file, name in (("by-file.py", "by_file"), ("elsewhere.py", "package.plug_in")):
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(file))
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    note(name, sys.modules[name])

write("run.py", 8)
source = runpy.run_path("run.py")
found["run"] = rewards(lambda: World() if source["VALUE"] == 8 and source["make"]() else None, 1)

with open("settings.py", "w") as file:
    file.write("import threading, types\\nLOCK = threading.Lock()\\n")
    file.write("SETTINGS = types.SimpleNamespace(lock=threading.Lock(), value=10)\\n")
from settings import LOCK, SETTINGS

class Locked(World):
    lock = threading.RLock()

    def value(self):
        with LOCK, SETTINGS.lock, self.lock:
            return SETTINGS.value

found["locks"] = rewards(Locked, 1)

import json
print(json.dumps(found))
"""
UNGUARDED = """
import sys
from worlds import World, show
from . import level
class Env(World):
    def value(self):
        from .level import LEVEL
        return LEVEL
show(lambda: Env(), start_method=(sys.argv[1:] or ["zygote"])[0])
show(Env)
"""
NAMED = UNGUARDED.replace("from . import", "import").replace(
    "from .level", "from level"
)
#: As Python 3.14 starts processes, with what scripts of public reports do: ids that the script registers. By force,
#: because TorchRL has set a start method in the script host.
FORKSERVER = f"""
import multiprocessing
multiprocessing.set_start_method("forkserver", force=True)
{NAMED}
import gymnasium
from envherd.gymnasium import AsyncVectorEnv

class Mine(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(5)
    def reset(self, *, seed=None, options=None):
        return 0, {{}}
    def step(self, action):
        return 0, float(action), False, False, {{}}

gymnasium.register("Mine-v0", entry_point=Mine)
envs = AsyncVectorEnv([lambda: gymnasium.make("Mine-v0")] * 2)
envs.reset()
print(envs.step(envs.action_space.sample() * 0 + 3)[1].tolist())
envs.close()
"""
PARSING = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--level", type=float, default=4)
args = parser.parse_args()
from worlds import World
class Env(World):
    def value(self):
        return args.level
"""
#: Name -> files, command, last lines of the output.
PROGRAMS = {
    "definitions": (
        {"main.py": DEFINITIONS},
        ["main.py"],
        [[17.0, 17.0], [27.0, 27.0]],
    ),
    "python -m": (
        {"pkg/__init__.py": "", "pkg/level.py": "LEVEL = 3", "pkg/mod.py": UNGUARDED},
        ["-m", "pkg.mod"],
        None,
    ),
    "a package": (
        {"pkg/level.py": "LEVEL = 3", "pkg/__main__.py": UNGUARDED},
        ["-m", "pkg"],
        None,
    ),
    "a folder": (
        {
            "app/level.py": "LEVEL = 3",
            "app/worlds.py": WORLDS,
            "app/__main__.py": NAMED,
        },
        ["app"],
        None,
    ),
    "an unguarded import": (
        {"main.py": "import train", "train.py": NAMED, "level.py": "LEVEL = 3"},
        ["main.py"],
        None,
    ),
    "an unguarded package": (
        {
            "main.py": "import pkg",
            "pkg/__init__.py": UNGUARDED,
            "pkg/level.py": "LEVEL = 3",
        },
        ["main.py", "portable"],
        None,
    ),
    "by forkserver": (
        {"main.py": FORKSERVER, "level.py": "LEVEL = 3"},
        ["main.py"],
        [[3.0, 3.0]] * 3,
    ),
    "arguments": (
        {
            "main.py": "import parsing\nfrom worlds import show\nshow(parsing.Env)",
            "parsing.py": PARSING,
        },
        ["main.py", "--level", "2"],
        [[2.0, 2.0]],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_ways_to_start_a_script(tmp_path, script_host, name):
    files, command, expected = PROGRAMS[name]
    for file, text in {**files, "worlds.py": WORLDS}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    printed = run(script_host, tmp_path, *command)
    assert printed == (expected or [[3.0, 3.0]] * 2)


@pytest.mark.long
def test_modules_that_no_worker_can_import_go_by_value(tmp_path, script_host):
    (tmp_path / "worlds.py").write_text(WORLDS)
    (tmp_path / "script.py").write_text(MODULES)
    (found,) = run(script_host, tmp_path, "script.py")
    by_number = [
        "path removed",
        "shadowed",
        "made",
        "reloaded",
        "deleted",
        "by_file",
        "package.plug_in",
    ]
    assert found == {name: [i, i] for i, name in enumerate(by_number, 1)} | {
        "run": [0.0],
        "locks": [10.0],
    }


# ---- objects that processes share ---------------------------------------------------------------

ADVICE = "multiprocessing.get_context('spawn')"


@pytest.mark.long
def test_objects_that_processes_share_are_not_copied(tmp_path, script_host):
    script = Path(__file__).with_name("sharing_script.py")
    by_zygote, by_portable = run(script_host, tmp_path, script)
    assert by_zygote == {
        "a tensor": [4.0, 4.0, 0.0],
        "parameters": [4.0],
        "a queue": [1] * 4,
        "a queue of a fork": ADVICE,
        "values": [4, 4.0, 0.0, True],
        "values of a fork": ADVICE,
        "a pipe": [1] * 4,
        "a pipe both ways": ADVICE,
        "a raw array": [7, 0],
        "a manager": [1] * 4,
        "a manager with a key": [1] * 4,
        "named memory": [7],
    }
    assert by_portable == by_zygote


def test_a_shared_object_that_its_owner_has_released_is_refused(tmp_path):
    with (tmp_path / "one").open("w") as file, sharing():
        shared = reduction.DupFd(file.fileno())
    with (tmp_path / "other").open("w") as file:
        assert file.fileno() == shared.fd
        with pytest.raises(RuntimeError, match="has released it"):
            shared.detach()


def test_keyword_arguments_that_cannot_be_sent_are_named():
    with pytest.raises(
        FactoryError,
        match=r"env_kwargs failed: .*SimpleQueue at \[0\] -> \['jobs'\] .*Manager",
    ):
        ParallelEnv(
            1,
            CountingEnv,
            env_kwargs={"jobs": multiprocessing.get_context("fork").SimpleQueue()},
        )


# ---- what must not happen while a module is imported --------------------------------------------

STARTING = """
from envherd import ExecutorOptions, ParallelEnv
from envherd.workers.testing import CountingEnv
ParallelEnv(1, CountingEnv, options=ExecutorOptions(start_method="{}"))
"""
NO_MODULES = {
    "parsing_arguments": (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.parse_args(['--level'])",
        "SystemExit: 2. The import of parsing_arguments parses this program's arguments with argparse",
    ),
    "exiting": (
        "import sys\nsys.exit('no licence')",
        "SystemExit: no licence. The import of exiting calls sys.exit",
    ),
    **{
        f"starting_{start_method}": (
            STARTING.format(start_method),
            rf"got the import of starting_{start_method} in a worker .*{start_method}.py:4\). Put what makes",
        )
        for start_method in ("zygote", "spawn", "portable")
    },
}


@pytest.mark.parametrize("name", NO_MODULES)
def test_imports_that_no_worker_survives_are_explained(tmp_path, monkeypatch, name):
    text, message = NO_MODULES[name]
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Its helper must survive the import also.
    options = ExecutorOptions(preload=(name,))
    with pytest.raises(FactoryError, match=message):
        ParallelEnv(1, lambda: importlib.import_module(name), options=options)


def test_a_factory_that_exits_is_named():
    with pytest.raises(
        FactoryError, match=r"the factory raised SystemExit: 3. It calls sys.exit"
    ):
        ParallelEnv(1, lambda: sys.exit(3))
