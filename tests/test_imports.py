"""Imports point one way, and a worker stays light: shm <- workers <- executor <- benchmarks."""

import ast
import functools
import graphlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from envherd import moved
from envherd.executor import ExecutorOptions, MeltingPotFactory, ParallelEnv
from envherd.workers.adapters.named import NamedFactory, PettingZooFactory
from envherd.workers.testing import CountingEnv
from tests.envs.own_substrate import build_substrate
from tests.extras import has_extra, needs

ROOT = Path(__file__).parents[1]
LAYERS = ("shm", "workers", "executor", "benchmarks")
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for layer in LAYERS
    for path in (ROOT / layer).rglob("*.py")
)

#: A file may import what any pattern that matches it allows, anywhere in the file.
ALLOWED = {
    "shm/*": {"numpy", "envherd.shm"},
    "workers/*": {"numpy", "cloudpickle", "envherd.shm", "envherd.workers"},
    "workers/adapters/dm_env/*": {"dm_env"},
    "workers/adapters/envpool*.py": {"envpool", "gymnasium"},
    "workers/adapters/gymnasium/*": {"gymnasium"},
    "workers/adapters/meltingpot/*": {"dm_env", "dmlab2d", "meltingpot"},
    "workers/adapters/named.py": {"dm_control", "envpool", "gymnasium", "pettingzoo"},
    "workers/adapters/pettingzoo/*": {"pettingzoo", "gymnasium"},
    "workers/adapters/simulators/*": {"torch", "tensordict"},
    "workers/adapters/torchrl/*": {"torch", "tensordict", "torchrl"},
    "executor/*": {
        "numpy",
        "torch",
        "tensordict",
        "psutil",
        "envherd.shm",
        "envherd.workers",
        "envherd.executor",
    },
    "executor/cli/*": {"typer", "rich"},
    "executor/cli/media.py": {"PIL"},
    "executor/doctor.py": {"packaging"},
    "executor/show/camera.py": {"imageio", "imageio_ffmpeg"},
    "executor/show/loggers.py": {"prometheus_client"},
    "executor/progress.py": {"tqdm"},
    "executor/cluster/*.py": {"ray"},
    "executor/facades/gymnasium/*": {"gymnasium"},
    "executor/facades/cleanrl/*": {"gymnasium"},
    "executor/facades/spaces.py": {"gymnasium"},
    "executor/facades/pettingzoo/*": {"gymnasium"},
    "executor/facades/pettingzoo/stacked.py": {"pettingzoo"},
    "executor/facades/rllib/*": {"gymnasium", "ray"},
    "executor/facades/sb3/*": {"stable_baselines3", "gymnasium"},
    "executor/facades/torchrl/*": {"torchrl"},
    "benchmarks/*": {"numpy", "torch", "tensordict", "gymnasium", "rich"}
    | {"envherd.shm", "envherd.workers", "envherd.executor", "benchmarks"},
    "benchmarks/__main__.py": {"typer"},
    "benchmarks/ours.py": {"envherd.gymnasium", "envherd.sb3", "envherd.torchrl"},
    "benchmarks/bounds.py": {"meltingpot"},
    "benchmarks/faults.py": {"stable_baselines3", "torchrl"},
    "benchmarks/peers.py": {
        "envpool",
        "pufferlib",
        "stable_baselines3",
        "tianshou",
        "torchrl",
    },
    "benchmarks/plots.py": {"matplotlib"},
}
#: The parts of each layer, packages and single modules: each imports only itself and earlier parts.
ORDER = {
    "shm": (
        "platforms",
        "interrupts",
        "finalizer",
        "specs",
        "sync",
        "cgroups",
        "segment",
        "slab",
        "__init__",
    ),
    "workers": (
        *(
            "__init__",
            "errors",
            "plain",
            "options",
            "current",
            "guest",
            "sending",
        ),
        *(
            "infos",
            "messages",
            "protocol",
            "reply",
            "seeding",
            "random_values",
            "processes",
            "writers",
        ),
        *("adapters.base", "adapters.registry", "adapters.common"),
        *(
            "adapters.gymnasium",
            "adapters.gymnasium_vector",
            "adapters.envpool",
            "adapters.dm_env",
        ),
        *(
            "adapters.meltingpot",
            "adapters.pettingzoo",
            "adapters.torchrl",
            "adapters.simulators",
        ),
        *("adapters.torch_native", "adapters.named", "adapters.env_names", "adapters"),
        *(
            "wrappers",
            "native",
            "info_rows",
            "block",
            "build",
            "process",
            "guests",
            "testing",
        ),
    ),
    "executor": (
        *(
            "keywords",
            "progress",
            "options",
            "machine",
            "sending",
            "start",
            "processes",
        ),
        *("batches", "pools", "protocol", "rollouts"),
        *(
            "guests.monitor",
            "guests.simulator",
            "guests",
            "assembly",
            "batched",
            "guests.collectors",
            "serial",
        ),
        *("sizing", "parallel", "testing", "show", "__init__"),
        *("doctor", "facades", "cluster", "cli"),
    ),
}
#: What somebody must know to change a step, a reset or a loss. It imports no guest.
KERNEL = (
    "shm/*",
    "workers/*",
    *(
        "executor/options.py",
        "executor/batches/*",
        "executor/pools/*",
        "executor/processes/*",
        "executor/protocol/*",
    ),
    *("executor/rollouts/*", "executor/start/*"),
)
#: Tests of the kernel that need no guest.
OF_THE_KERNEL = (
    *(
        "tests/shm/test_slab.py",
        "tests/workers/test_slot.py",
        "tests/workers/test_loop.py",
    ),
    *(
        "tests/executor/batches/test_intake.py",
        "tests/executor/pools/test_command_words.py",
    ),
    *(
        "tests/executor/protocol/test_losses.py::TestReplacing",
        # One of the deadlines: the others wait for seconds, and use the same modules.
        "tests/executor/protocol/test_losses.py::TestDeadlines::test_a_late_worker_has_ended_before_rows_are_written_in_its_place",
    ),
)
#: Packages that only the adapter of their family imports, when there is an env of it.
HEAVY = {
    "dm_control",
    "dm_env",
    "dmlab2d",
    "gymnasium",
    "jax",
    "meltingpot",
    "pettingzoo",
    "stable_baselines3",
    "tensordict",
    "tensorflow",
    "torch",
    "torchrl",
}
FAMILIES = (
    "dm_env",
    "envpool",
    "gymnasium",
    "meltingpot",
    "pettingzoo",
    "simulators",
    "torch",
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_packages(path: Path) -> Iterator[str]:
    """Yield a file's imports outside the standard library: packages, and `envherd.LAYER`."""
    for node in ast.walk(parsed(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [str(node.module)]
        for name in names:
            parts = name.split(".")
            if parts[0] not in sys.stdlib_module_names:
                yield ".".join(parts[:2]) if parts[0] == "envherd" else parts[0]


def test_a_file_imports_only_what_its_layer_may():
    beyond = {}
    for file in FILES:
        allowed = set().union(
            *(
                packages
                for pattern, packages in ALLOWED.items()
                if fnmatch(file, pattern)
            )
        )
        beyond[file] = (
            set(imported_packages(ROOT / file)) - allowed - {"_multiprocessing"}
        )
    assert {file: packages for file, packages in beyond.items() if packages} == {}


def test_a_worker_process_names_no_family():
    for file in (file for file in FILES if file.startswith("workers/process/")):
        source = (ROOT / file).read_text().lower()
        assert [
            family for family in FAMILIES if f"adapters.{family}" in source
        ] == [], file


def module_name(file: str) -> str:
    """Return the module that a source file is."""
    return "envherd." + file.removesuffix(".py").removesuffix("/__init__").replace(
        "/", "."
    )


MODULES = {module_name(file).removeprefix("envherd."): ROOT / file for file in FILES}


def part_of(module: str) -> tuple[str, str]:
    """Return a module's layer and its part of it: the longest name in `ORDER` that it begins with."""
    layer, _, rest = module.partition(".")
    names = (rest or "__init__").split(".")
    parts = (".".join(names[:count]) for count in range(len(names), 0, -1))
    return layer, next(
        (part for part in parts if part in ORDER.get(layer, ())), names[0]
    )


@functools.cache
def imported_modules(module: str) -> set[str]:
    """Return which modules of envherd a module imports, anywhere in its file."""
    found = set()
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.removeprefix("envherd.") in MODULES else str(node.module)
                for name in inside
            ]
        else:
            continue
        found |= {
            name.removeprefix("envherd.")
            for name in names
            if name.startswith("envherd.")
        }
    return found & MODULES.keys()


def against_order(module: str) -> set[tuple[str, str]]:
    """Return a module's imports of its own layer that violate the order."""
    layer, part = part_of(module)
    order = ORDER[layer]
    own = (
        (other, part_of(other)[1])
        for other in imported_modules(module)
        if part_of(other)[0] == layer
    )
    return {
        (module, other)
        for other, its_part in own
        if order.index(its_part) > order.index(part)
    }


ORDERED = [module for module in MODULES if part_of(module)[0] in ORDER]


def test_the_parts_of_a_layer_import_one_way():
    assert set().union(*map(against_order, ORDERED)) == set()


def is_kernel(module: str) -> bool:
    file = MODULES[module].relative_to(ROOT).as_posix()
    return ".guests" not in module and any(fnmatch(file, pattern) for pattern in KERNEL)


def test_the_kernel_imports_no_guest():
    kernel = [module for module in MODULES if is_kernel(module)]
    assert len(kernel) > 80
    found = {
        module: {name for name in imported_modules(module) if ".guests" in name}
        for module in kernel
    }
    assert {module: guests for module, guests in found.items() if guests} == {}


@pytest.mark.long
def test_the_kernel_works_without_any_guest(tmp_path):
    for folder in ("envherd", "shm", "workers", "executor", "tests"):
        guests = shutil.ignore_patterns("__pycache__", "guests", "golden")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=guests)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
    ]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, *OF_THE_KERNEL],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_old_name_of_a_module_is_the_new_module():
    for old, new in moved.MOVED.items():
        module = importlib.import_module(f"envherd.{old}")
        assert module is importlib.import_module(f"envherd.{new}")
        assert module.__spec__.name == module.__name__ == f"envherd.{new}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {one: set(imported_modules(one)) for one in ORDERED}
    # Raises CycleError, which names the modules of one.
    graphlib.TopologicalSorter(graph).prepare()


LIGHT = [
    file
    for file in FILES
    if not file.startswith(
        (
            "executor/",
            "benchmarks/",
            *(f"workers/adapters/{family}" for family in FAMILIES),
        )
    )
]
_ADAPTERS, _FACADES = "envherd.workers.adapters", "envherd.executor.facades"
#: Modules that a worker imports -> the heavy packages that they may load. `worker` and `factory` are a facade's half in
#: a worker; the rest of the facade loads torch and its host.
MAY_LOAD: dict[tuple[str, ...], set[str]] = {
    tuple(map(module_name, LIGHT)): set(),
    (f"{_ADAPTERS}.gymnasium.adapter",): {"gymnasium"},
    (f"{_ADAPTERS}.dm_env.adapter",): {"dm_env"},
    (
        f"{_ADAPTERS}.meltingpot.adapter",
        f"{_ADAPTERS}.meltingpot.factory",
        f"{_ADAPTERS}.named",
    ): set(),
    (f"{_ADAPTERS}.pettingzoo.adapter",): {"gymnasium"},
    (f"{_FACADES}.pettingzoo.stacked",): {"gymnasium", "pettingzoo"},
    **{
        (f"{_FACADES}.{facade}.worker",): {"gymnasium"}
        for facade in ("cleanrl", "gymnasium", "pettingzoo", "rllib", "sb3")
    },
    (f"{_FACADES}.sb3.factory", "envherd.workers.adapters.light_tensorboard"): set(),
}
#: Imports each line of modules in a fork of a process that has imported nothing, and prints the packages loaded there.
LOADING = """
import importlib, os, sys
for line in sys.argv[2:]:
    if not (pid := os.fork()):
        for name in line.split():
            importlib.import_module(name)
        print(*sorted(set(sys.argv[1].split()) & sys.modules.keys()), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.long
def test_worker_imports_only_its_family():
    assert len(LIGHT) > 20
    lacking = set() if has_extra("dm-control") else {"dm_env"}
    tried = {
        names: allowed for names, allowed in MAY_LOAD.items() if not lacking & allowed
    }
    command = [sys.executable, "-c", LOADING, " ".join(HEAVY), *map(" ".join, tried)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    )
    for line, (names, allowed) in zip(
        done.stdout.splitlines(), tried.items(), strict=True
    ):
        assert set(line.split()) <= allowed, names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "start_method"),
    [
        pytest.param(CountingEnv, "zygote", id="plain"),
        pytest.param(
            NamedFactory("gymnasium", "CartPole-v1"), "zygote", id="gymnasium"
        ),
        pytest.param(
            NamedFactory("dm_control", "cartpole/balance"),
            "zygote",
            marks=needs("dm-control"),
            id="dm_control",
        ),
        pytest.param(
            MeltingPotFactory("collaborative_cooking__cramped"),
            "zygote",
            marks=needs("meltingpot"),
            id="meltingpot",
        ),
        pytest.param(
            PettingZooFactory("mpe2.simple_spread_v3"),
            "zygote",
            marks=needs("pettingzoo"),
            id="pettingzoo",
        ),
        *(
            pytest.param(
                build_substrate,
                start_method,
                marks=needs("meltingpot"),
                id=f"a user's substrate, {start_method}",
            )
            for start_method in ("zygote", "spawn")
        ),
    ],
)
def test_a_running_worker_has_no_torch_tensorflow_or_jax(factory, start_method):
    with ParallelEnv(
        1,
        factory,
        num_workers=1,
        seed=0,
        options=ExecutorOptions(start_method=start_method),
    ) as env:
        env.rollout(3)
        pid = env.statistics().workers[0].pid
        libraries = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" in libraries
    for library in ("libtorch", "tensorflow", "jaxlib"):
        assert library not in libraries
    assert "libtorch" in Path("/proc/self/maps").read_text(), (
        "this is how it would show"
    )
