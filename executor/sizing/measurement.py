"""A probe's measurements of an env, as frozen values in seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envherd.shm.slab import plan_slab
from envherd.shm.specs import EnvSpec

#: A step blocks if it waits (sleeps, reads, lets its own threads work) for more than this share of its time.
_BLOCKING_SHARE = 0.2
#: Bytes by which a process may grow because of Python itself.
_NOISE_BYTES = 64 * 1024
#: Squared coefficient of variation of episodes' lengths if only one has ended.
_VARIATION = 0.5


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One env, measured alone in a worker process.

    Attributes:
        spec: its observations and actions.
        build_s: the first build in a process, including imports that the factory does not announce.
        build_further_s: a further build in the same process; `build_s` if there was none.
        first_reset_s: the first reset.
        reset_median_s: median of the resets after the first; `first_reset_s` if there was none.
        step_median_s, step_p99_s, step_mean_s: of a step on an undisturbed processor with its row, without resets.
        cpu_per_step_s: processor seconds of a step, of all threads and child processes.
        hidden_cpu_share: share of `cpu_per_step_s` that the env's threads and processes use.
        num_threads: threads (and processes) that the env has started.
        steps_measured: number of steps behind the figures.
        end_share: share of steps that ended an episode; 0 if none did.
        episode_steps: the length of the episodes that ended, if all had the same; else 0.
        contention: share of the time in which the probe waited for a processor.
        worker_bytes: memory of a worker without an env.
        first_env_bytes: added by the first env of a worker.
        further_env_bytes: added by each further one; `first_env_bytes` if there was none.
        shared_bytes: what exists once for all workers: the helper, and libraries.
        grown_per_1000_steps_bytes: of one env; small ones are noise.
        row_bytes: of one env in a batch: a transition, the next root and the action.
        gpu_bytes: memory of GPUs that the probe used; None without a GPU.
        start_s: from the start of the helper until a worker could build.
        is_alone: whether a process can have only one such env.
        stopped_by: text that describes what ended the probe early; empty if nothing did.
    """

    spec: EnvSpec
    build_s: float
    build_further_s: float
    first_reset_s: float
    reset_median_s: float
    step_median_s: float
    step_p99_s: float
    step_mean_s: float
    cpu_per_step_s: float
    hidden_cpu_share: float
    num_threads: int
    steps_measured: int
    end_share: float
    contention: float
    worker_bytes: int
    first_env_bytes: int
    further_env_bytes: int
    shared_bytes: int
    grown_per_1000_steps_bytes: int
    row_bytes: int
    gpu_bytes: int | None = None
    start_s: float = 0.0
    is_alone: bool = False
    stopped_by: str = ""
    episode_steps: int = 0
    step_samples: np.ndarray = field(default_factory=lambda: np.zeros(0))
    reset_samples: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def waits_share(self) -> float:
        """Share of a step in which the processor is free."""
        return max(0.0, 1 - self.cpu_per_step_s / self.step_mean_s) if self.step_mean_s > 0 else 0.0

    @property
    def whole_step_s(self) -> float:
        """Seconds of a step and its share of a reset."""
        return self.step_mean_s + self.end_share * self.reset_median_s

    @property
    def reset_share(self) -> float:
        """Share of an env's time that its resets take; 0 if no episode ended."""
        return 1 - self.step_mean_s / self.whole_step_s if self.end_share else 0.0

    def whole_steps(self, steps: int, resets: int) -> float:
        """Return the number of steps (each with its share of a reset) with the same work as these steps and resets."""
        return (steps * self.step_mean_s + resets * self.reset_median_s) / self.whole_step_s

    def to_plain(self) -> dict[str, Any]:
        """Return the figures as documented in docs/sizing.md."""
        left_out = ("spec", "reset_samples", "step_samples")
        plain = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**plain, "waits_share": self.waits_share, "reset_share": self.reset_share}


def from_figures(figures: Mapping[str, Any], *, helper_bytes: int, **further: Any) -> Measurement | None:
    """Return the measurement from a probe's figures, or None if it made no steps.

    Args:
        figures: of `workers.probing.probe`.
        helper_bytes: memory of the helper and what it shares with the probe, its only worker.
        **further: `start_s`, `gpu_bytes`, `stopped_by`.
    """
    if "steps" not in figures:
        return None
    spec = EnvSpec.from_plain(figures["spec"])
    steps = figures["steps"]
    count = max(1, steps["count"])
    wall, own, own_cpu_s = _own_times(np.asarray(steps["times"]) - [[0], [steps["clock_ns"]], [0]])
    hidden_s = max(0.0, (steps["process_cpu_ns"] - steps["main_cpu_ns"]) / 1e9 / count)
    hidden_s = hidden_s if hidden_s > 0.02 * own_cpu_s else 0.0
    reset_wall, resets, _ = _own_times(np.asarray(figures["resets"]).T)
    builds = [env["build_s"] for env in figures["envs"]]
    episodes = np.asarray(steps["episodes"], np.int64)
    has_one_length = len(episodes) > 0 and episodes.min() == episodes.max()
    first, further_bytes, clean = _env_bytes(figures)
    return Measurement(
        spec=spec,
        build_s=builds[0],
        build_further_s=float(np.median(builds[1:])) if len(builds) > 1 else builds[0],
        first_reset_s=float(reset_wall[0]),
        reset_median_s=float(np.median(resets[1:])) if len(resets) > 1 else float(reset_wall[0]),
        step_median_s=float(np.median(own)),
        step_p99_s=float(np.quantile(own, 0.99)),
        step_mean_s=float(own.mean()),
        cpu_per_step_s=own_cpu_s + hidden_s,
        hidden_cpu_share=hidden_s / (own_cpu_s + hidden_s) if own_cpu_s + hidden_s else 0.0,
        num_threads=max(0, figures["threads"] - figures["threads_before"]),
        steps_measured=steps["count"],
        end_share=share_of_ends(episodes, int(steps["under_way"])),
        episode_steps=int(episodes[0]) if has_one_length else 0,
        contention=float(steps["contention"]),
        worker_bytes=figures["base"]["dirty"],
        first_env_bytes=first,
        further_env_bytes=further_bytes,
        shared_bytes=helper_bytes + clean,
        grown_per_1000_steps_bytes=_grown_per_1000_steps(figures["envs"][0], count),
        row_bytes=row_bytes(spec),
        is_alone=figures["is_alone"],
        step_samples=wall,
        reset_samples=reset_wall,
        **further,
    )


def _own_times(times: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return per call wall seconds and seconds on an undisturbed processor, and mean processor seconds.

    For calls that only compute, the undisturbed time is their processor time. For calls that also wait, it is wall time
    minus the time spent waiting for a processor.

    Args:
        times: ns `[3, n]`: wall, processor, waiting for a processor.
    """
    wall, cpu, delay = np.maximum(times, 0) / 1e9
    undisturbed = np.maximum(wall - delay, cpu)
    is_computing = np.median(cpu) > (1 - _BLOCKING_SHARE) * np.median(undisturbed)
    return wall, cpu if is_computing else undisturbed, float(cpu.mean())


def _env_bytes(figures: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return `(first env, each further env, files mapped by an env that workers share)` in bytes."""
    envs = [env for env in figures["envs"] if "ready" in env or "stepped" in env]
    before = [figures["base"], *(env["before"] for env in envs[1:])]
    after = [env.get("ready", env.get("stepped")) for env in envs]
    # The probe's own rows for the env do not count as the env's memory.
    row = row_bytes(EnvSpec.from_plain(figures["spec"]))
    each = [max(0, one["dirty"] - other["dirty"] - row) for one, other in zip(after, before, strict=True)]
    return each[0], int(np.mean(each[1:] or each)), after[-1]["clean"]


def _grown_per_1000_steps(env: Mapping[str, Any], count: int) -> int:
    grown: int = env["stepped"]["dirty"] - env["warm"]["dirty"]
    return int(max(0, grown - _NOISE_BYTES) * 1000 / count)


def share_of_ends(episodes: np.ndarray, under_way: int) -> float:
    """Return the share of steps that end an episode.

    Ends divided by steps would be too small, because the current episode has not ended: by half an episode if all have
    one length, by nothing if every step is equally likely to end one, in general by `(1 - cv^2) / 2` episodes (cv: the
    coefficient of variation of their lengths; the second term of the elementary renewal theorem).

    Args:
        episodes: `[k]`, how many steps those had that have ended.
        under_way: how many the one after them has so far.
    """
    count = len(episodes)
    if not count:
        return 0.0
    variation = min(1.0, float(episodes.var(ddof=1) / episodes.mean() ** 2)) if count > 1 else _VARIATION
    if variation == 0:
        return 1 / float(episodes[0])
    return (count + (1 - variation) / 2) / float(episodes.sum() + under_way)


def row_bytes(spec: EnvSpec) -> int:
    """Return bytes of one env in a batch: its transition, its next root, its inputs."""
    plan = plan_slab([spec], 1, 1)
    return plan.groups[0].frame.nbytes + sum(field.nbytes for field in plan.groups[0].inputs)
