"""Whether episodes should be begun before they are needed: `ExecutorOptions(reset_ahead=True)`."""

from __future__ import annotations

from dataclasses import dataclass

from envherd.executor.sizing.model import Model, Prediction, Setting

#: Share of the envs' time that resets take, and of the processors' time that is idle, from which on it may pay.
_LEAST_SHARE, _LEAST_IDLE = 0.15, 0.4
#: Handing an env over costs about what a batch does besides the envs: a reset must take so many times as long.
_LEAST_LENGTH = 2.0
#: It takes twice the processes and more memory: it must be so much faster.
_GAIN = 1.2


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What resets ahead would do, on a worker and a spare for each env.

    Attributes:
        steps_per_s: env-steps per second of synchronous batches.
        memory_bytes: of workers, spares, helper and shared memory.
        idle_share: of the processors' time without them, which they use.
    """

    steps_per_s: float
    memory_bytes: int
    idle_share: float


def share_of_resets(model: Model) -> float:
    """Return which share of the envs' time is spent on resets."""
    return model.measured.end_share * model.measured.reset_s / model.busy_per_step_s


def resets_ahead(model: Model, setting: Setting, prediction: Prediction) -> Ahead | None:
    """Return what resets ahead would do for as many envs; None where they do not pay.

    Args:
        model: of the env.
        setting: that was chosen without them.
        prediction: of that setting.
    """
    # What the executor does is not made less by them.
    idle = 1 - (prediction.compute_s + prediction.overhead_s) / prediction.batch_s
    is_long = model.measured.reset_s > _LEAST_LENGTH * prediction.overhead_s
    has_room = idle >= _LEAST_IDLE and not model.measured.spec.batch_shape
    if share_of_resets(model) < _LEAST_SHARE or not (is_long and has_room):
        return None
    rate = model.ahead_steps_per_s(setting.num_envs)
    if rate < _GAIN * prediction.steps_per_s:
        return None
    both = 2 * setting.num_envs
    return Ahead(steps_per_s=rate, memory_bytes=model.memory_bytes(both, both), idle_share=idle)
