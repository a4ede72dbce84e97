"""A probe's measurements of an env, as frozen values in seconds and bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envherd.shm.slab import NUM_BINS, bin_middle
from envherd.shm.specs import EnvSpec

#: Squared coefficient of variation of episodes' lengths if only one has ended.
_VARIATION = 0.5
#: One step of at least this number that takes this share of the time of all, and twice that of the next longest, is a
#: pause of the machine, or too rare to count.
_MANY_STEPS, _LONE_SHARE, _LONE_FACTOR = 100, 0.2, 2.0
_MIDDLES = np.array([bin_middle(index) for index in range(NUM_BINS)])


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One env, measured alone in a worker process.

    Attributes:
        spec: its observations and actions.
        build_s: the first build in a process, including imports that the factory does not announce.
        build_further_s: a further build in the same process; `build_s` if there was none.
        first_reset_s: the first reset.
        reset_median_s: median of the resets after the first; `first_reset_s` if there was none.
        step_median_s, step_p99_s: of a step, with its row, to 10 %.
        step_mean_s: of a step, with its row, without the time in which the worker waited for a processor.
        cpu_per_step_s: processor seconds of a step, of all threads and child processes.
        hidden_cpu_share: share of `cpu_per_step_s` that the env's threads and processes use.
        num_threads: threads (and processes) that the env has started.
        steps_measured: number of steps behind the figures.
        end_share: share of steps that ended an episode; 0 if none did.
        episode_steps: the length of the episodes that ended, if all had the same; else 0.
        contention: share of the time of steps in which the worker waited for a processor.
        worker_bytes: memory of a worker with its first env.
        further_env_bytes: added by each further env.
        shared_bytes: what exists once for all workers: the helper, and libraries.
        grown_per_1000_steps_bytes: of one env; small ones are noise.
        row_bytes: of one env in a batch: a transition, the next root and the action.
        gpu_bytes: memory of GPUs that the probe used; None without a GPU.
        why_alone: why a process can have only one such env: the error of several in one process; empty if it can.
        step_bins: int `[NUM_BINS]`, steps by duration; see `shm.slab.bin_of`.
        resets_s: seconds of each reset, float `[n]`.
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
    further_env_bytes: int
    shared_bytes: int
    grown_per_1000_steps_bytes: int
    row_bytes: int
    gpu_bytes: int | None = None
    why_alone: str = ""
    episode_steps: int = 0
    step_bins: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    resets_s: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def is_alone(self) -> bool:
        """Whether a process can have only one such env."""
        return bool(self.why_alone)

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
        """Return the figures as documented in docs/reference/json.md."""
        plain = {name: value for name, value in vars(self).items() if name not in ("spec", "step_bins", "resets_s")}
        return {**plain, **{name: getattr(self, name) for name in ("waits_share", "reset_share", "is_alone")}}


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


def without_pause(bins: np.ndarray, busy_s: float) -> tuple[np.ndarray, float]:
    """Return steps and their time without the longest one, if that alone took much of the time.

    The steps of a quick env in a probe take some milliseconds in all, and a machine may pause for longer.

    Args:
        bins: int `[NUM_BINS]`, steps by duration.
        busy_s: of all of them.
    """
    if bins.sum() < _MANY_STEPS:
        return bins, busy_s
    left, longest = bins.copy(), np.flatnonzero(bins)[-1]
    left[longest] -= 1
    share = float(_MIDDLES[longest] / max(1.0, _MIDDLES @ bins))
    if share < _LONE_SHARE or _MIDDLES[longest] < _LONE_FACTOR * _MIDDLES[np.flatnonzero(left)[-1]]:
        return bins, busy_s
    return left, busy_s * (1 - share)
