"""What runs on a node, in a Ray actor: the envs of a share as a `ParallelEnv`, and a copy of the policy.

Guarantees: errors of envs, workers and arguments are returned, because Ray would wrap them; others are raised. An actor
that Ray has started in the place of a lost one continues from what the driver knows of that. It ends with its raylet.
Threads: Ray makes the calls of `do` in one thread, in their order. It answers for a sign of life, and calls `close`, in
a second one.
"""

import dataclasses
import functools
import os
import pickle
import platform
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.transfer import as_array
from envherd.executor.cluster.shares import ClusterError
from envherd.executor.guests.collectors.policy import Placed, tensors_of
from envherd.executor.machine.machine import usable_cores
from envherd.executor.parallel import ParallelEnv
from envherd.executor.processes.error_messages import numbering
from envherd.workers.errors import EnvherdError
from envherd.workers.seeding import episode_seed
from envherd.workers.sending import registries

#: Seconds between checks of the parent.
_PARENT_S = 0.5
# In the place of an env's id, for the seed of the policy's generator.
_STREAM = 2**32 - 3


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes, by name."""
    names = ("envherd", "ray", "numpy", "torch", "tensordict", "cloudpickle")
    return {
        "python": platform.python_version().rpartition(".")[0],
        **{name: metadata.version(name) for name in names},
    }


class Packed(NamedTuple):
    """A tensor as Ray sends it, without pickling the values."""

    array: np.ndarray
    dtype: torch.dtype


class Node:
    """Runs the envs of a share; see the module.

    Args:
        *task: the arguments of `_build`.
    """

    env: Any = None
    _is_current = False
    #: The latest rows of the envs, `[n]`; None if these are not in the middle of episodes.
    _rows: TensorDictBase | None = None

    def __init__(self, *task: Any) -> None:
        threading.Thread(
            target=_end_with,
            args=(os.getppid(),),
            name="envherd-parent",
            daemon=True,
        ).start()
        # Of the data that this actor returns.
        ray.util.register_serializer(
            torch.Tensor,
            serializer=packed,
            deserializer=unpacked,
        )
        node_id = ray.get_runtime_context().get_node_id()[:8]
        self._place = f"node {platform.node()}/{node_id}, pid {os.getpid()}"
        self._task = task

    def do(
        self,
        call: Callable[..., Any],
        state: bytes | None,
        *args: Any,
        **how: Any,
    ) -> Any:
        """Make a call; return its result, where this is, and the state after the call; or the error.

        Args:
            call: called with this object; a method, for example.
            state: that the latest answer has returned; None for the first call.
            *args: further arguments of the call.
            **how: likewise.
        """
        try:
            if self.env is None:
                self.env = self._build(*self._task)
            # An actor before this one was lost.
            if state is not None and not self._is_current and call != Node.load:
                self.load(pickle.loads(state))
            self._is_current = True
            result = call(self, *args, **how)
            return (
                result,
                self._place,
                pickle.dumps({**self.save(with_envs=False), "rows": self._rows}),
            )
        except EnvherdError as error:
            return error

    def _build(
        self,
        expected: Mapping[str, str],
        registered: bytes,
        factories: Sequence[bytes],
        cores: float,
        first: int,
        how: Mapping[str, Any],
    ) -> ParallelEnv:
        """Start the workers and build the envs.

        Args:
            expected: the driver's versions.
            registered: names of envs; see `workers.sending.registries`.
            factories: one per env, pickled.
            cores: of the share; infinity for all.
            first: id in the batch of env 0.
            how: further arguments of `ParallelEnv`.
        """
        for name, version in versions().items():
            if version != expected[name]:
                raise ClusterError(
                    f"RayRollouts failed: expected {name} {expected[name]} on every node, as in the driver, got "
                    f"{version} on {self._place}. Install the same environment on all nodes."
                )
        numbering.first_env_id = first
        numbering.place = self._place.partition(",")[0]
        options = dataclasses.replace(
            how["options"],
            first_env_id=how["options"].first_env_id + first,
        )
        # At most one for each env: `ParallelEnv` takes no other number of them for envs that are alone.
        num_workers = how["num_workers"] or max(
            1,
            int(min(cores, usable_cores(), len(factories))),
        )
        torch.manual_seed(episode_seed(how["seed"], _STREAM, options.first_env_id))
        try:
            registries.install(registered)
            # Envs of one factory share it here as well.
            made = functools.cache(pickle.loads)
            return ParallelEnv(
                [made(pickled) for pickled in factories],
                **{**how, "options": options, "num_workers": num_workers},
            )
        except EnvherdError:
            raise
        except Exception as error:
            raise ClusterError(
                f"RayRollouts failed: expected {self._place} to build its envs, got {type(error).__name__}: {error}.",
                remote_traceback=traceback.format_exc(),
            ) from error

    def roll(
        self,
        num_steps: int,
        acting: Sequence[Any] | None,
        how: dict[str, Any],
        *,
        keeps_state: bool,
    ) -> TensorDictBase:
        """Make a rollout.

        Args:
            num_steps: T.
            acting: Ray's references of the policy and of its weights; None for random actions.
            how: further arguments of `rollout`.
            keeps_state: continue with the policy's own state after the latest rollout.
        """
        policy = None if acting is None else _weighted(*acting)
        if keeps_state:
            how["tensordict"] = self._rows
        data = self.env.rollout(num_steps, policy, break_when_any_done=False, **how)
        self._rows = data[:, -1]["next"].clone()
        return data

    def save(self, *, with_envs: bool | None) -> dict[str, Any]:
        """Return the state: that of `ParallelEnv`, of the policy's generator, and which envs have ended."""
        return {
            **self.env.state_dict(with_envs=with_envs),
            "torch": torch.get_rng_state(),
            "ended": self.env.engine.states.needs_reset.tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        After the loss of an actor it has the latest rows of the envs. Those that were in an episode then begin with an
        interrupted row.
        """
        self.env.load_state_dict(state)
        torch.set_rng_state(state["torch"].clone())
        self._rows = state.get("rows")
        if self._rows is not None:
            roots = [row.to_dict() for row in self._rows.unbind(0)]
            self.env.engine.take_over(roots, np.array(state["ended"]))

    def close(self) -> None:
        """Close the envs."""
        if self.env is not None:
            self.env.close()


@functools.lru_cache(maxsize=1)
def _made(policy: Any) -> Placed:
    """Return the policy of a reference; fetched and built once."""
    return Placed(pickle.loads(ray.get(policy))())


@functools.lru_cache(maxsize=1)
def _weighted(policy: Any, weights: Any) -> Placed:
    """Return the policy with the weights of another reference; what this process lacks is fetched."""
    placed = _made(policy)
    sent = ray.get(weights)
    # A policy that is no module has none.
    tensors = tensors_of(placed.policy) if sent else []
    with torch.no_grad():
        for mine, value in zip(tensors, sent, strict=True):
            mine.copy_(unpacked(value))
    return placed


def packed(tensor: torch.Tensor) -> Packed:
    """Return a tensor of any device as what `unpacked` takes."""
    return Packed(as_array(tensor.detach().cpu()), tensor.dtype)


def unpacked(sent: Packed) -> torch.Tensor:
    """Return a tensor on the CPU, in its own memory: Ray's is read-only."""
    return torch.tensor(sent.array, device="cpu").view(sent.dtype)


def _end_with(parent: int) -> None:
    """End this process without cleanup when its parent has ended, however that ended.

    Ray's own processes check whether their parent has become process 1. Under a session manager, in some containers and
    with other subreapers it does not, and actors would stay alive with all their workers.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    os._exit(1)
