"""What runs on a node, in a Ray actor: the envs of a share as a `ParallelEnv`, and a copy of the policy.

Guarantees: errors of envs, workers and arguments are returned, because Ray would wrap them; others are raised. An actor
that Ray has started in the place of a lost one begins new episodes. Ray ends it with its node.
"""

import dataclasses
import functools
import os
import pickle
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

# In the place of an env's id, for the seed of the policy's generator.
_STREAM = 2**32 - 3


class Node:
    """Runs the envs of a share; see the module.

    Args:
        *task: the arguments of `_build`.
    """

    env: Any = None
    #: The latest rows of the envs, `[n]`; None if these are not in the middle of episodes.
    rows: TensorDictBase | None = None

    def __init__(self, *task: Any) -> None:
        # Of the data that this actor returns: Ray pickles the values of a tensor, and maps those of an array.
        ray.util.register_serializer(
            torch.Tensor,
            serializer=packed,
            deserializer=unpacked,
        )
        node_id = ray.get_runtime_context().get_node_id()[:8]
        numbering.place = f"node {platform.node()}/{node_id}"
        self._task = task

    def do(
        self,
        call: Callable[..., Any],
        rows: TensorDictBase | None,
        *args: Any,
        **how: Any,
    ) -> Any:
        """Make a call; return its result, where this is, and the rows after the call; or the error.

        Args:
            call: called with this object; a method, for example.
            rows: that the latest answer has returned; None for the first call.
            *args: further arguments of the call.
            **how: likewise.
        """
        try:
            if self.env is None:
                self.env = self._build(*self._task)
                if rows is not None:  # an actor before this one was lost
                    self._take_over(rows)
            result = call(self, *args, **how)
            return result, f"{numbering.place}, pid {os.getpid()}", self.rows
        except EnvherdError as error:
            return error

    def _build(
        self,
        registered: bytes,
        factories: Sequence[bytes],
        cores: float,
        first: int,
        how: Mapping[str, Any],
    ) -> ParallelEnv:
        """Start the workers and build the envs.

        Args:
            registered: names of envs; see `workers.sending.registries`.
            factories: one per env, pickled.
            cores: of the share; infinity for all.
            first: id in the batch of env 0.
            how: further arguments of `ParallelEnv`.
        """
        numbering.first_env_id = first
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
        registries.install(registered)
        # Envs of one factory share it here as well.
        load = functools.cache(pickle.loads)
        try:
            make_env = [load(pickled) for pickled in factories]
        except Exception as error:  # whatever their modules and classes raise
            raise ClusterError(
                f"RayRollouts failed: expected {numbering.place} to read the factories, got {type(error).__name__}: "
                f"{error}. Install there what they import, or pass runtime_env=."
            ) from error
        return ParallelEnv(
            make_env,
            **{**how, "options": options, "num_workers": num_workers},
        )

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
            how["tensordict"] = self.rows
        data = self.env.rollout(num_steps, policy, break_when_any_done=False, **how)
        self.rows = data[:, -1]["next"].clone()
        return data

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state; see `RayRollouts.state_dict`."""
        self.env.load_state_dict(state)
        torch.set_rng_state(state["torch"].clone())
        self.rows = None

    def _take_over(self, rows: TensorDictBase) -> None:
        """Begin with an interrupted row for each env that was in an episode, and new episodes then."""
        self.rows = rows
        roots = [row.to_dict() for row in rows.unbind(0)]
        ended = np.array([bool(root["done"].any()) for root in roots])
        self.env.engine.take_over(roots, ended)


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


def packed(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype]:
    """Return a tensor of any device as what `unpacked` takes."""
    return as_array(tensor.detach().cpu()), tensor.dtype


def unpacked(sent: tuple[np.ndarray, torch.dtype]) -> torch.Tensor:
    """Return a tensor on the CPU, in its own memory: Ray's is read-only."""
    return torch.tensor(sent[0], device="cpu").view(sent[1])
