"""What this process may really use of the machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return how many cores this process may use: its affinity, or its cgroup's CPU quota if that is less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cpu_quota(cgroup)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """Return the cgroup's CPU quota in cores (v2 `cpu.max`, v1 `cpu.cfs_quota_us`), or None without one."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)
