"""Machines, measurements and runs for tests of sizing that start no process."""

from __future__ import annotations

from dataclasses import replace

from envherd.executor.machine.cgroups import Cgroup
from envherd.executor.machine.machine import Machine
from envherd.executor.sizing.measurement import Measurement
from envherd.executor.sizing.settings import Run, Setting
from envherd.shm.specs import Discrete, EnvSpec, LeafSpec

GIB, MIB = 2**30, 2**20
SPEC = EnvSpec((LeafSpec(("observation",), (4,)),), (LeafSpec(("action",), (), "int64", Discrete(2)),))


def machine_of(num_cpus=8, *, memory=64 * GIB, **changes):
    cpus = tuple(range(num_cpus))
    plain = Machine(
        cpus=cpus, num_cpus=num_cpus, physical_cores=num_cpus, cgroup=Cgroup(),
        memory_total=memory, memory_free=memory, shm_total=None, shm_free=None,
        limits={"nofile": 1024}, open_files=10, user_threads=10, load=0.0, cpu_pressure=0.0,
    )  # fmt: skip
    return replace(plain, **changes)


def measured_of(step_s=1e-3, **changes):
    plain = Measurement(
        spec=SPEC, build_s=0.1, build_further_s=0.1, first_reset_s=10 * step_s, reset_median_s=10 * step_s,
        step_median_s=step_s, step_p99_s=step_s, step_mean_s=step_s, cpu_per_step_s=step_s,
        hidden_cpu_share=0.0, num_threads=0, steps_measured=1000, end_share=0.001, contention=0.0,
        worker_bytes=25 * MIB, further_env_bytes=10 * MIB, shared_bytes=30 * MIB,
        grown_per_1000_steps_bytes=0, row_bytes=100,
    )  # fmt: skip
    return replace(plain, **changes)


def run_of(num_workers, steps_per_s, *, num_envs=8, busy=1.0, **changes):
    """Return the run of a setting; `mode` and `refusal` may be given."""
    refusal = changes.pop("refusal", None)
    setting = Setting(num_envs=num_envs, num_workers=num_workers, **changes)
    return Run(setting=setting, steps_per_s=steps_per_s, busy_share=busy, rounds=5, start_s=0.5, refusal=refusal)
