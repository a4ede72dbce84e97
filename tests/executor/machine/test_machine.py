"""The resources of a process: control groups from file trees of real machines, and those of this machine."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from envherd.executor.machine import machine as machine_module
from envherd.executor.machine.gpus import Gpu, parse_smi
from envherd.executor.machine.machine import (
    Cgroup,
    read_cgroup,
    read_machine,
    usable_cores,
)
from envherd.shm import platforms
from tests.shm.test_cgroups import tree

GIB, MIB = 2**30, 2**20

V2_MOUNT = (
    "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
)
V1_MOUNT = "{id} 23 0:3{id} {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"

BARE = {
    "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n",
    "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    + V2_MOUNT.format(root="/"),
    "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
    "sys/fs/cgroup/user.slice/memory.max": "max\n",
    "sys/fs/cgroup/user.slice/memory.current": "5000000000\n",
    "sys/fs/cgroup/user.slice/user-1000.slice/pids.max": "10813\n",
    "sys/fs/cgroup/user.slice/user-1000.slice/pids.current": "813\n",
    "sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope/cpu.max": "max 100000\n",
}

# docker run --cpus=1.5 --memory=2g, cgroup v1: the path in /proc is the host's, the mount shows only the container's.
DOCKER = {
    "proc/self/cgroup": "5:memory:/docker/4f2a\n4:cpu,cpuacct:/docker/4f2a\n3:cpuset:/docker/4f2a\n0::/system.slice\n",
    "proc/self/mountinfo": "".join(
        V1_MOUNT.format(id=i, root="/docker/4f2a", name=name)
        for i, name in enumerate(("memory", "cpu,cpuacct", "cpuset"))
    ),
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"cache 1\ninactive_file 5\ntotal_inactive_file {256 * MIB}\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
}

# A pod with limits cpu: 500m, memory: 1Gi; a private cgroup namespace, so that its own group is the root.
KUBERNETES = {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": V2_MOUNT.format(root="/"),
    "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
    "sys/fs/cgroup/cpu.max": "50000 100000\n",
    "sys/fs/cgroup/memory.max": f"{GIB}\n",
    "sys/fs/cgroup/memory.current": f"{600 * MIB}\n",
    "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
    "sys/fs/cgroup/memory.events": "low 0\noom 1\noom_kill 1\n",
    "sys/fs/cgroup/pids.max": "1024\n",
    "sys/fs/cgroup/pids.current": "24\n",
}

# srun --cpus-per-task=4 --mem=8G: a cpuset, and the memory limit on the step above the task.
SLURM = {
    "proc/self/cgroup": "9:memory:/slurm/uid_1/job_7/step_0/task_0\n8:cpuset:/slurm/uid_1/job_7/step_0/task_0\n",
    "proc/self/mountinfo": V1_MOUNT.format(id=1, root="/", name="memory")
    + V1_MOUNT.format(id=2, root="/", name="cpuset"),
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.limit_in_bytes": f"{16 * GIB}\n",
    "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/slurm/uid_1/job_7/step_0/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/slurm/uid_1/job_7/step_0/memory.usage_in_bytes": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory/slurm/uid_1/job_7/step_0/task_0/memory.usage_in_bytes": f"{1 * GIB}\n",
}

# systemd-run --slice=training.slice -p CPUQuota=250%; the unit itself has more than its slice, and memory.high.
SLICE = {
    "proc/self/cgroup": "0::/training.slice/run-7.service\n",
    "proc/self/mountinfo": V2_MOUNT.format(root="/"),
    "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    "sys/fs/cgroup/training.slice/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/training.slice/run-7.service/cpu.max": "400000 100000\n",
    "sys/fs/cgroup/training.slice/run-7.service/memory.max": f"{8 * GIB}\n",
    "sys/fs/cgroup/training.slice/run-7.service/memory.high": f"{6 * GIB}\n",
    "sys/fs/cgroup/training.slice/run-7.service/memory.current": f"{1 * GIB}\n",
}


def test_bare_metal(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_module, "usable_cpus", lambda: tuple(range(8)))
    machine = read_machine(tree(tmp_path, BARE))
    assert machine.cores == 8.0
    assert machine.cgroup.pids_room == 10_000
    assert machine.processes_left <= 10_000
    assert machine.memory_available == machine.memory_free
    assert (machine.cgroup.cpu_quota, machine.cgroup.memory_limit) == (None, None)


#: tree, cores, workers by default, memory limit, room, pids left, kills for memory
LAYOUTS = {
    "docker v1": (DOCKER, 1.5, 2, 2 * GIB, 1 * GIB + 256 * MIB, None, 3),
    "kubernetes": (KUBERNETES, 0.5, 1, GIB, 524 * MIB, 1000, 1),
    "slurm": (SLURM, 64.0, 64, 8 * GIB, 6 * GIB, None, 0),
    "systemd slice": (SLICE, 2.5, 3, 6 * GIB, 5 * GIB, None, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_limits_of_containers_and_jobs(tmp_path, monkeypatch, layout):
    files, cores, workers, limit, room, pids, kills = LAYOUTS[layout]
    monkeypatch.setattr(machine_module, "usable_cpus", lambda: tuple(range(64)))
    root = tree(tmp_path, files)
    machine = replace(read_machine(root), memory_free=99 * GIB)
    assert machine.cores == cores
    assert usable_cores(root) == workers
    assert machine.cgroup.memory_limit == limit
    assert machine.memory_available == room
    assert machine.cgroup.pids_room == pids
    assert machine.cgroup.oom_kills == kills


def test_the_machine_may_have_less_memory_than_the_limit_leaves(tmp_path):
    machine = replace(read_machine(tree(tmp_path, SLURM)), memory_free=GIB)
    assert machine.memory_available == GIB


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({**KUBERNETES, "proc/self/cgroup": "0::/../../other.scope\n"}, 0.5),
        (
            {
                **DOCKER,
                "sys/fs/cgroup/unified/cpu.max": "100 100000\n",
                "proc/self/mountinfo": f"{DOCKER['proc/self/mountinfo']}"
                "40 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            },
            1.5,
        ),
    ],
    ids=["outside of the namespace: at the mount", "v1 where v2 is also mounted"],
)
def test_odd_mounts_of_groups(tmp_path, files, quota):
    assert read_cgroup(tree(tmp_path, files)).cpu_quota == quota


def test_no_groups_at_all(tmp_path):
    machine = read_machine(tmp_path)
    assert machine.cgroup == Cgroup()
    assert machine.cores == len(machine.cpus)


def test_processors_that_are_threads_of_one_core_count_once(monkeypatch):
    siblings = {f"cpu{i}": f"{i % 4},{i % 4 + 4}" for i in range(8)}
    monkeypatch.setattr(
        machine_module, "read_word", lambda file: siblings.get(file.parent.parent.name)
    )
    monkeypatch.setattr(machine_module, "usable_cpus", lambda: tuple(range(8)))
    assert read_machine().physical_cores == 4


def test_pressure_is_a_share(monkeypatch):
    text = "some avg10=12.50 avg60=3.00 avg300=1.00 total=1\nfull avg10=0.00 avg60=0.00 total=0"
    monkeypatch.setattr(
        machine_module,
        "read_word",
        lambda file: text if "pressure" in file.parts else None,
    )
    assert read_machine().cpu_pressure == 0.125


SMI = """0, GPU-aaa, NVIDIA A100-SXM4-40GB, 40960, 40000
1, GPU-bbb, NVIDIA A100-SXM4-40GB, 40960, 1024
2, GPU-ccc, Tesla T4, 15360, [N/A]
"""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["A", "A", "T"]),
        ("", []),
        ("2,0", ["T", "A"]),
        ("GPU-bbb", ["A"]),
        ("0,9,1", ["A"]),
    ],
)
def test_gpus_that_are_visible(visible, names):
    found = parse_smi(SMI, visible)
    assert [gpu.name.removeprefix("NVIDIA ")[0] for gpu in found] == names


def test_memory_of_gpus():
    assert parse_smi(SMI, "1,2") == (
        Gpu("NVIDIA A100-SXM4-40GB", 40 * GIB, GIB),
        Gpu("Tesla T4", 15 * GIB, None),
    )
    assert parse_smi("No devices were found\n", None) == ()


# ---- this machine ----------------------------------------------------------------------------------

_SAY = (
    "import json; from envherd.executor.machine.machine import read_machine, usable_cores; m = read_machine(); "
    "print(json.dumps([m.cores, usable_cores(), m.cgroup.memory_limit, m.memory_available, m.files_left]))"
)


def figures_under(prefix: list[str]) -> list:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", _SAY],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_affinity_of_this_process():
    machine = read_machine()
    assert machine.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert 0 < machine.memory_available <= machine.memory_total
    assert machine.files_left is None or machine.files_left > 0


@pytest.mark.parametrize(
    "getrlimit", [None, OSError("refused")], ids=["missing", "refused"]
)
def test_a_system_may_hide_its_limits(monkeypatch, getrlimit):
    hidden = (
        None
        if getrlimit is None
        else SimpleNamespace(getrlimit=Mock(side_effect=getrlimit), RLIMIT_AS=9)
    )
    monkeypatch.setattr(platforms, "resource", hidden)
    machine = read_machine()
    assert (machine.address_space, machine.files_left) == (None, None)


@pytest.mark.slow
def test_taskset_and_prlimit_are_seen():
    first = min(os.sched_getaffinity(0))
    cores, workers, _, _, files = figures_under(
        ["taskset", "-c", str(first), "prlimit", "--nofile=200:200"]
    )
    assert workers == 1
    assert 150 < files < 200
    assert cores <= 1


@contextlib.contextmanager
def group(folder: Path, files: dict[str, str]) -> Iterator[Path]:
    """Make a control group with limits, or skip where it cannot be made."""
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        for name, text in files.items():
            (folder / name).write_text(text)
        yield folder
    finally:
        folder.rmdir()


def figures_in(controller, limits):
    """Return `figures_under` a new cgroup (v1) with limits."""
    folder = Path("/sys/fs/cgroup") / controller
    if not (folder / "cgroup.procs").exists() or not os.access(folder, os.W_OK):
        pytest.skip(f"no v1 {controller} controller that can be written")
    with group(folder / f"envherd-test-{os.getpid()}", limits) as own:
        enter = f'echo $$ > {own}/cgroup.procs && exec "$@"'
        return figures_under(["sh", "-c", enter, "sh"])


@pytest.mark.slow
def test_a_real_cpu_quota_is_seen():
    cores, workers, *_ = figures_in("cpu", {"cpu.cfs_quota_us": "50000"})
    assert (cores, workers) == (0.5, 1)


@pytest.mark.slow
def test_a_real_memory_limit_is_seen():
    _, _, limit, available, _ = figures_in(
        "memory", {"memory.limit_in_bytes": str(GIB)}
    )
    assert limit == GIB
    assert GIB // 2 < available < GIB
