"""Segments are shared by descriptor, sealed, checked against the available memory, and never named."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envherd.shm import segment as module
from envherd.shm.cgroups import GroupMemory
from envherd.shm.platforms import reserve
from envherd.shm.segment import Segment
from tests.conftest import gained_shm_names, shm_names
from tests.faults.children import limited


def test_two_mappings_see_the_same_bytes():
    ours = Segment.create(1000)
    theirs = Segment.attach(ours.nbytes, fd=os.dup(ours.fd))
    ours.array()[:4] = [1, 2, 3, 4]
    assert theirs.array()[:4].tolist() == [1, 2, 3, 4]
    ours.close()
    theirs.close()


def test_size_is_whole_pages_of_zeros():
    segment = Segment.create(1)
    assert segment.nbytes % 4096 == 0
    assert not segment.array().any()
    segment.close()


@pytest.mark.parametrize("create", [Segment.create, Segment.create_with_name])
def test_a_limit_on_files_is_named(create):
    with (
        limited(resource.RLIMIT_FSIZE, 8192),
        pytest.raises(
            MemoryError, match=r"expected 0\.016 MiB, got .*large.*\(ulimit -f\)"
        ),
    ):
        create(1 << 14)


def test_views_outlive_the_segment():
    segment = Segment.create(16)
    array = segment.array()
    array[0] = 7
    segment.close()
    segment.close()
    assert array[0] == 7


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_segment_cannot_be_resized(size):
    segment = Segment.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, size)
    segment.close()


def test_segment_has_no_name():
    before = shm_names()
    segment = Segment.create(1 << 20)
    assert not gained_shm_names(before)
    segment.close()


def test_too_much_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(module, "available_bytes", lambda: 1 << 20)
    with pytest.raises(
        MemoryError, match=r"at most 90% of the 1 MiB available, got 2 MiB"
    ):
        Segment.create(2 << 20)


def test_the_room_in_the_control_groups_counts(monkeypatch):
    monkeypatch.setattr(
        module,
        "read_memory",
        lambda: GroupMemory(limit=4 << 20, room=3 << 20, used=1 << 20),
    )
    assert module.available_bytes() == 3 << 20
    with pytest.raises(
        MemoryError, match=r"at most 90% of the 3 MiB available, got 4 MiB"
    ):
        Segment.create(4 << 20)


_NAMED = """
from envherd.shm import segment as module
module.HAS_MEMFD = False
ours = module.Segment.create(64)
theirs = module.Segment.attach(ours.nbytes, name=ours.name)
ours.array()[:2] = [5, 6]
print(ours.name, theirs.array()[:2].tolist())
theirs.close()
ours.close()
"""


def test_a_named_segment_serves_where_there_is_no_memfd():
    done = subprocess.run(
        [sys.executable, "-c", _NAMED], capture_output=True, text=True, check=True
    )
    name, values = done.stdout.split(" ", 1)
    assert values.strip() == "[5, 6]"
    assert not Path("/dev/shm", name).exists()


def test_a_name_that_an_interrupt_leaves_behind_is_removed(monkeypatch):
    """Ctrl-C while the pages are reserved arrives before the caller has the segment."""
    names = []

    def interrupted(fd, nbytes):
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        signal.raise_signal(signal.SIGINT)
        reserve(fd, nbytes)

    monkeypatch.setattr("envherd.shm.segment.reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Segment.create_with_name(100)
    assert names[0].startswith("envherd-")
    assert not Path("/dev/shm", names[0]).exists()


def test_freed_memory_is_unmapped_without_a_line_of_python():
    """Python would drop a KeyboardInterrupt that a signal handler raises in such a line."""
    lines = []

    def note(frame, event, _arg):
        lines.append((frame.f_code.co_name, event))
        return note

    segment = Segment.create(100, "envherd-freed")
    view = segment.array()
    segment.close()
    assert "envherd-freed" in Path("/proc/self/maps").read_text()
    sys.settrace(note)
    del view
    sys.settrace(None)
    assert lines == []
    assert "envherd-freed" not in Path("/proc/self/maps").read_text()
