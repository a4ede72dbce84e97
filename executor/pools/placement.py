"""Placement: separate busy workers that share a processor while another processor has none of them.

The kernel keeps such a pair together as long as the caller, which polls for answers, keeps the other processor busy:
two tasks and one are as balanced as one and two. A batch then takes twice as long. So the caller checks from time to
time, while it waits anyway, where its workers run, and asks one of a pair to move.

Guarantees:
- No pinning: a worker moves itself between two commands and keeps its affinity. Processes of an env inherit the
  worker's full affinity, and the kernel balances later changes (other load, more threads).
- A worker moves only to a processor that its affinity (which includes a cpuset) allows, that no busy worker is on, and
  that other tasks used for less than half of the time since the last check. With `options.affinity` no worker moves.
- Checks take at most 1/`_COST` of the caller's time, and each asks at most one worker to move.
Assumes: the kernel places processes that wait, or that compute in threads other than their first one.
Platforms: Linux; values that /proc or sysfs do not have are ignored.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from envherd.executor.machine.cgroups import parse_cpu_list
from envherd.shm.cgroups import read_word
from envherd.shm.interrupts import ignoring_refusals
from envherd.workers.processes import idle_s, place_of
from envherd.workers.protocol import pack_seat

_ROOT = Path("/")
#: Seconds between checks, and between readings of the other load: /proc counts idle time in steps of 10 ms.
_EVERY_S = 0.05
#: Seconds of more frequent checks after workers shared a processor, and seconds between these checks: if all processes
#: spin between batches, a pair forms again within tens of milliseconds (in a third of the checks; `w100` of
#: benchmarks/placement.py, 23 Nov 2026).
_WATCH_S, _SOON_S = 1.0, 0.01
#: Checks take at most 1/`_COST` of the caller's time (10 to 30 us of processor time per worker).
_COST = 128
#: Least share of a processor's time that other tasks leave free, for a worker to be sent there.
_ROOM = 0.5
#: Least share of its time that the caller computes, for workers to be kept off its processor.
_BUSY_CALLER = 0.5


@dataclass(frozen=True)
class Topology:
    """Processor -> the first one of its core, and its NUMA node; those that are missing are cores of node 0."""

    core_of: Mapping[int, int] = field(default_factory=dict)
    node_of: Mapping[int, int] = field(default_factory=dict)


@cache
def read_topology(root: Path = _ROOT) -> Topology:
    """Read the topology of processors from sysfs; cached."""
    cores, nodes = {}, {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*"):
        siblings = parse_cpu_list(read_word(folder / "topology/thread_siblings_list") or "")
        cores.update(dict.fromkeys(siblings, min(siblings, default=0)))
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        nodes.update(dict.fromkeys(parse_cpu_list(read_word(folder / "cpulist") or ""), int(folder.name[4:])))
    return Topology(cores, nodes)


def choose(
    places: Mapping[int, int],
    caller: int | None,
    allowed: Mapping[int, Iterable[int]],
    room: Mapping[int, float],
    topology: Topology,
) -> dict[int, int]:
    """Return worker -> new processor for workers that share one with another worker or the caller, and can move.

    The processor has no busy worker. Preferred is one without the caller (only one of a pair of workers may be sent to
    the caller's), then a free core, then the same NUMA node.

    Args:
        places: the processor of each busy worker.
        caller: the processor that the caller keeps busy, or None.
        allowed: the processors that each of these workers may use.
        room: for each processor, the share of its time that other tasks leave free, 0..1.
        topology: of the processors.
    """
    taken = Counter(places.values())
    moves: dict[int, int] = {}
    for worker_id in sorted(places, key=lambda one: taken[places[one]] == 1):  # pairs first
        here = places[worker_id]
        is_pair = taken[here] > 1
        if not is_pair and here != caller:
            continue
        busy_cores = {topology.core_of.get(cpu, cpu) for cpu in (*+taken, caller) if cpu is not None}
        home = topology.node_of.get(here, 0)
        ranked = [
            (cpu == caller, topology.core_of.get(cpu, cpu) in busy_cores, topology.node_of.get(cpu, 0) != home, cpu)
            for cpu in allowed[worker_id]
            if not taken[cpu] and room.get(cpu, 0.0) >= _ROOM and (is_pair or cpu != caller)
        ]
        if ranked:
            moves[worker_id] = target = min(ranked)[-1]
            taken[here] -= 1
            taken[target] += 1
    return moves


class Usage(NamedTuple):
    """Counters of the machine at one time.

    Attributes:
        at: seconds of the monotonic clock.
        own: processor seconds of the calling thread.
        idle: idle seconds of each processor.
    """

    at: float
    own: float
    idle: Mapping[int, float]


def room_between(before: Usage, now: Usage, caller: int | None) -> dict[int, float]:
    """Return for each processor the share of the time in between in which it was idle or ran only the caller."""
    span_s = max(now.at - before.at, 1e-9)
    room = {cpu: (idle - before.idle[cpu]) / span_s for cpu, idle in now.idle.items() if cpu in before.idle}
    if caller in room:
        room[caller] += (now.own - before.own) / span_s
    return room


class Placement:
    """Places the workers of one pool: call `look` when it is `due`, best when they have just begun to work.

    Args:
        words: of the slab; "seat", "looks" and "stacked" of each worker are written here.

    Attributes:
        due: time of the next check, in seconds of the monotonic clock.
    """

    def __init__(self, words: Mapping[str, np.ndarray]) -> None:
        self._seats, self._looks, self._stacked = words["seat"], words["looks"], words["stacked"]
        self.due = 0.0
        self._before = Usage(0.0, 0.0, {})
        self._shared_at = -_WATCH_S
        self._topology = read_topology()

    def look(self, pids: Sequence[int]) -> None:
        """Check where the workers run, and ask those to move that share a processor unnecessarily."""
        before, now = self._before, Usage(time.monotonic(), time.thread_time(), {})
        is_busy = now.own - before.own >= _BUSY_CALLER * (now.at - before.at)
        caller = place_of("thread-self")[1] if is_busy else None
        places = {}
        for worker_id, pid in enumerate(pids):
            is_running, cpu = place_of(pid)
            if is_running:
                places[worker_id] = cpu
                self._looks[worker_id] += 1
        if len({*places.values(), caller}) <= len(places):
            self._take_apart(places, caller, pids, now)
        is_watching = now.at - self._shared_at < _WATCH_S
        if now.at - before.at >= _EVERY_S:
            self._before = now._replace(idle=idle_s()) if is_watching else now
        self.due = now.at + max(_SOON_S if is_watching else _EVERY_S, _COST * (time.thread_time() - now.own))

    def _take_apart(self, places: dict[int, int], caller: int | None, pids: Sequence[int], now: Usage) -> None:
        allowed = {worker_id: _affinity(pids[worker_id]) for worker_id in places}
        everywhere = dict.fromkeys((cpu for cpus in allowed.values() for cpu in cpus), 1.0)
        moves = choose(places, caller, allowed, everywhere, self._topology)
        if not moves:
            return
        self._stacked[[*moves]] += 1
        self._shared_at = now.at
        if not self._before.idle or now.at - self._before.at > _WATCH_S:
            return  # the other load is not known yet
        room = room_between(self._before, now._replace(idle=idle_s()), caller)
        for worker_id, cpu in choose(places, caller, allowed, room, self._topology).items():
            self._seats[worker_id] = pack_seat(int(self._seats[worker_id]), cpu)


def _affinity(pid: int) -> set[int]:
    with ignoring_refusals():
        return os.sched_getaffinity(pid)
    return set()
