"""The memory limits of control groups: the process's own group and its ancestors; page cache counts as free."""

import pytest

from envherd.shm.cgroups import GroupMemory, read_memory

MIB = 2**20

V1 = {
    "proc/self/cgroup": "4:memory:/job\n0::/\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
}
V2 = {
    "proc/self/cgroup": "0::/job.slice/task.scope\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}


def tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


#: Files of a group of 400 MiB that has read a data set: nearly all of its memory is page cache.
FULL_OF_CACHE = {
    "v1": {
        "memory.limit_in_bytes": f"{400 * MIB}\n",
        "memory.usage_in_bytes": f"{399 * MIB}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {300 * MIB}\ntotal_active_file {75 * MIB}\n",
    },
    "v2": {
        "memory.max": f"{400 * MIB}\n",
        "memory.current": f"{399 * MIB}\n",
        "memory.stat": f"anon 5\ninactive_file {300 * MIB}\nactive_file {75 * MIB}\n",
    },
}


@pytest.mark.parametrize(
    ("base", "version", "folder"),
    [(V1, "v1", "sys/fs/cgroup/memory/job"), (V2, "v2", "sys/fs/cgroup/job.slice")],
)
def test_page_cache_is_room_in_the_own_group_and_in_those_above(
    tmp_path, base, version, folder
):
    files = {f"{folder}/{name}": text for name, text in FULL_OF_CACHE[version].items()}
    (tmp_path / folder / "task.scope").mkdir(parents=True)
    found = read_memory(tree(tmp_path, {**base, **files}))
    assert found == GroupMemory(limit=400 * MIB, room=376 * MIB, used=24 * MIB)


def test_a_container_of_v1_that_sees_its_own_group_at_the_mount(tmp_path):
    mounts = "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    mounts += "31 30 0:26 /job /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    files = {
        f"sys/fs/cgroup/memory/{name}": text
        for name, text in FULL_OF_CACHE["v1"].items()
    }
    assert (
        read_memory(tree(tmp_path, {**V1, "proc/self/mountinfo": mounts, **files})).room
        == 376 * MIB
    )


def test_the_tightest_group_decides(tmp_path):
    files = {
        "sys/fs/cgroup/job.slice/memory.max": f"{100 * MIB}\n",
        "sys/fs/cgroup/job.slice/memory.current": f"{90 * MIB}\n",
        "sys/fs/cgroup/job.slice/task.scope/memory.max": f"{50 * MIB}\n",
        "sys/fs/cgroup/job.slice/task.scope/memory.current": f"{5 * MIB}\n",
    }
    assert read_memory(tree(tmp_path, {**V2, **files})).room == 10 * MIB


def test_no_limit_and_no_groups(tmp_path):
    unlimited = {
        "sys/fs/cgroup/job.slice/task.scope/memory.max": "max\n",
        "sys/fs/cgroup/job.slice/task.scope/memory.current": "7\n",
    }
    assert read_memory(tree(tmp_path / "v2", {**V2, **unlimited})) == GroupMemory(
        used=7
    )
    assert read_memory(tmp_path / "nothing") == GroupMemory()
