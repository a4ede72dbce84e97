"""`Collector`: an iterator of rollouts, for training loops.

Guarantees: batches follow each other without a gap (each begins where the one before it ended, episodes
and the policy's own state included), every transition in them was executed, and the policy is never
copied, pickled or moved unless `policy_device` is set.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase

from envherd.executor.batches.arguments import (
    as_count,
    need_bools,
    need_callables,
    need_state,
)
from envherd.executor.batches.transfer import as_device
from envherd.executor.guests.collectors.policy import Placed, Policy
from envherd.executor.keywords import names_right_keyword
from envherd.executor.processes.error_messages import log
from envherd.executor.progress import showing
from envherd.executor.rollouts.policy_state import own_leaves
from envherd.shm.finalizer import ClosedAtEnd
from envherd.shm.specs import EnvSpec


class Rolls(Protocol):
    """The methods that a collector uses of an executor: `ParallelEnv`, `SerialEnv`, or `RayRollouts`."""

    num_envs: int
    specs: tuple[EnvSpec, ...]

    def rollout(  # noqa: PLR0913  # the arguments of TorchRL's rollout
        self,
        max_steps: int,
        policy: Policy | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = ...,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        tensordict: TensorDictBase | None = None,
        primer: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Collect up to `max_steps` steps."""

    def close(self) -> None:
        """Close it."""


class BatchIterator(ClosedAtEnd):
    """What collectors have in common: arguments, the iteration of their batches, and a `with` that closes them.

    Args:
        env: the executor.
        policy: see the collectors; so are the others.
        frames_per_batch: as the caller has passed it; a collector rounds it up.
        total_frames: end of the iteration; -1 for none.
        policy_device: see there.
        storing_device: see there.
        primer: see there.
        postproc: see there.
        close_env: see there.

    Attributes:
        num_frames: collected so far.
    """

    _placed: Placed | None
    collect: Any
    close: Any
    num_frames = 0

    def __init__(  # noqa: PLR0913  # what every collector takes
        self,
        env: Any,
        policy: Policy | None,
        *,
        frames_per_batch: int,
        total_frames: int,
        policy_device: torch.device | str | None,
        storing_device: torch.device | str | None,
        primer: TensorDictBase | None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
        close_env: bool,
    ) -> None:
        call = type(self).__name__
        self.frames_per_batch = as_count(call, "frames_per_batch", frames_per_batch)
        self.total_frames = as_count(call, "total_frames", total_frames, least=-1)
        need_callables(call, policy=policy, postproc=postproc)
        need_bools(call, close_env=close_env)
        need_state(call, "primer", primer, env.num_envs)
        self._policy_device = as_device(
            policy_device,
            call,
            "policy_device as a device",
        )
        self._storing_device = as_device(
            storing_device,
            call,
            "storing_device as a device",
        )
        self._primer = primer
        self._postproc = postproc
        self._closes_env = close_env

    @property
    def policy(self) -> Any:
        """The callable in use: the policy itself, or its copy; None for random actions."""
        return None if self._placed is None else self._placed.policy

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Collect until `total_frames` are reached; a second loop continues where the first was left."""
        with showing(
            "frames collected",
            self.total_frames,
            done=self.num_frames,
        ) as shown:
            while self.total_frames < 0 or self.num_frames < self.total_frames:
                # Nothing in between: an interrupt there would lose the batch.
                yield self.collect()
                shown.update(self.frames_per_batch)

    def __len__(self) -> int:
        """Return the number of batches in all, which progress bars show.

        Raises:
            TypeError: it never stops (`total_frames=-1`).
        """
        if self.total_frames < 0:
            raise TypeError(
                "len failed: expected a collector with total_frames, got one that never stops."
            )
        return math.ceil(self.total_frames / self.frames_per_batch)

    def __bool__(self) -> bool:
        """Return True, for any number of batches."""
        return True


class Collector(BatchIterator):
    """Iterates batches `[N, T]` of `frames_per_batch` transitions (N envs, T = `frames_per_batch` / N).

    The first batch begins with a reset of all envs, unless `env.load_state_dict` has loaded their state.

    Args:
        env: the executor.
        policy: takes a root batch `[N]` and returns it with the action; other keys that it adds are kept. None draws
            random actions. Keys that it writes into `next` are in its next root.
        frames_per_batch: env steps per batch, all envs together; rounded up to a multiple of N.
        total_frames: stop after this number of env steps, rounded up to whole batches; -1 never stops.
        policy_factory: builds the policy in this process, before the first batch; instead of `policy`.
        policy_device: device on which the policy runs. None does not move it. For another device the policy is copied
            there once, and the copy gets the original's weights before every batch. A policy that cannot be copied (or
            has `copyable = False`) is not moved: the data is moved to it, and a warning names the reason.
        storing_device: device of the batches; None: that of the envs' batches.
        init_random_frames: draw random actions for this number of frames at the beginning, rounded up to whole batches.
        reset_at_each_iter: reset all envs before every batch.
        primer: batch `[N]`, the policy's state at the beginning of an episode (a recurrent state).
        postproc: applied to every batch.
        callback: called with the executor and each step's batch, as that of `rollout`.
        close_env: close the executor with the collector.

    Attributes:
        num_frames: transitions collected so far.
        policy: the callable in use, or None.

    Raises:
        ValueError: `frames_per_batch` is below 1, or both a policy and a factory were passed.
    """

    @names_right_keyword
    def __init__(  # noqa: PLR0913  # the arguments of TorchRL's collectors
        self,
        env: Rolls,
        policy: Policy | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        policy_factory: Callable[[], Policy] | None = None,
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        init_random_frames: int = 0,
        reset_at_each_iter: bool = False,
        primer: TensorDictBase | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        close_env: bool = True,
    ) -> None:
        if not hasattr(env, "rollout"):
            raise TypeError(
                f"Collector failed: expected an executor first, got {env!r}. Write Collector(env, policy)."
            )
        super().__init__(
            env,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            policy_device=policy_device,
            storing_device=storing_device,
            primer=primer,
            postproc=postproc,
            close_env=close_env,
        )
        self._init_random_frames = as_count(
            "Collector",
            "init_random_frames",
            init_random_frames,
            least=0,
        )
        need_callables(
            "Collector",
            policy_factory=policy_factory,
            callback=callback,
        )
        need_bools("Collector", reset_at_each_iter=reset_at_each_iter)
        if policy is not None and policy_factory is not None:
            raise ValueError(
                "Collector failed: expected a policy or a policy_factory, got both. Leave one out."
            )
        self.env = env
        asked = self.frames_per_batch
        self.num_steps = math.ceil(asked / env.num_envs)
        self.frames_per_batch = self.num_steps * env.num_envs
        self._policy_factory = policy_factory
        self._placed = None if policy is None else Placed(policy, self._policy_device)
        self._resets_always = reset_at_each_iter
        self._callback = callback
        self._has_begun = False
        self._state: TensorDictBase | None = None
        self._warn_of_rounding(asked)

    def _warn_of_rounding(self, asked: int) -> None:
        num_envs = self.env.num_envs
        batch = self.frames_per_batch
        roundings = [
            f"{name}={frames} is not a multiple of {count} {what}"
            for name, frames, count, what in (
                ("frames_per_batch", asked, num_envs, "envs"),
                ("total_frames", self.total_frames, batch, "frames per batch"),
                (
                    "init_random_frames",
                    self._init_random_frames,
                    batch,
                    "frames per batch",
                ),
            )
            if frames > 0 and frames % count
        ]
        if roundings:
            log.warning("%s: rounded up.", " and ".join(roundings))

    def collect(self) -> TensorDictBase:
        """Return the next batch `[N, T]`; the caller owns its memory.

        Raises:
            EnvError, WorkerLost, WorkerTimeout: the batch is lost. The next one resets the envs concerned; the others
                continue, with the policy's latest state. (With `RayRollouts` and such a state, all envs begin new
                episodes: the state is lost with the data.)
        """
        try:
            is_resumed = getattr(self.env, "is_resumed", False)
            resets = self._resets_always or not (self._has_begun or is_resumed)
            data = self.env.rollout(
                self.num_steps,
                self._policy_now(),
                auto_reset=resets,
                break_when_any_done=False,
                callback=self._callback,
                tensordict=None if resets else self._state,
                primer=self._primer,
            )
        except BaseException:
            self._has_begun = self._has_begun and (
                self._state is None or hasattr(self.env, "policy_state")
            )
            self._state = getattr(self.env, "policy_state", None)
            raise
        self._has_begun = True
        if is_resumed:
            self.env.is_resumed = False  # type: ignore[attr-defined]  # of an executor
        self._state = self._state_after(data)
        self.num_frames += self.frames_per_batch
        if self._storing_device is not None:
            data = data.to(self._storing_device)
        return data if self._postproc is None else self._postproc(data)

    def _policy_now(self) -> Placed | None:
        if self.num_frames < self._init_random_frames:
            return None
        if self._placed is None and self._policy_factory is not None:
            self._placed = Placed(self._policy_factory(), self._policy_device)
        if self._placed is not None:
            self._placed.follow()
        return self._placed

    def update_policy_weights_(self) -> None:
        """Copy the original's present weights to the policy's copy, if there is one; also done before every batch."""
        if self._placed is not None:
            self._placed.follow()

    def _state_after(self, data: TensorDictBase) -> TensorDictBase | None:
        """Return the policy's own state after a batch `[N]`, in its own memory; None if it has none."""
        known = {leaf.key for spec in self.env.specs for leaf in spec.leaves()}
        own = own_leaves(data.get("next")[:, -1], known)
        return None if own is None else own.clone()

    def close(self) -> None:
        """Close the executor, unless it is the caller's (`close_env=False`). Idempotent."""
        if self._closes_env:
            self.env.close()

    shutdown = close
    """The same under TorchRL's name."""
