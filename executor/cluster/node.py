"""What runs on a node, in a Ray actor: the envs of a share as a `ParallelEnv`, and a copy of the policy.

Guarantees: an actor that Ray has started in the place of a lost one begins new episodes. Ray ends it with its node.
"""

import functools
import os
import pickle
import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.transfer import as_array
from envherd.executor.cluster.shares import ClusterError
from envherd.executor.guests.collectors.policy import Placed, set_tensors
from envherd.executor.parallel import ParallelEnv
from envherd.executor.processes.error_messages import numbering
from envherd.workers.seeding import episode_seed
from envherd.workers.sending import registries

# In the place of an env's id, for the seed of the policy's generator.
_STREAM = 2**32 - 3


class Node:
    """Runs the envs of a share; see the module.

    Args:
        registered: names of envs; see `workers.sending.registries`.
        sent: the keyword arguments of `ParallelEnv`, pickled.
        first: id in the batch of env 0.
    """

    env: Any = None
    #: The latest rows of the envs, `[n]`; None if these are not in the middle of episodes.
    rows: TensorDictBase | None = None

    def __init__(self, registered: bytes, sent: bytes, first: int) -> None:
        # Of the data that this actor returns: Ray pickles the values of a tensor, and maps those of an array.
        ray.util.register_serializer(
            torch.Tensor,
            serializer=packed,
            deserializer=unpacked,
        )
        numbering.place = (
            f"node {platform.node()}/{ray.get_runtime_context().get_node_id()[:8]}"
        )
        numbering.first_env_id = first
        registries.install(registered)
        self._sent = sent

    def do(
        self,
        call: Callable[..., Any],
        rows: TensorDictBase | None,
        *args: Any,
    ) -> Any:
        """Make a call; return its result, where this is, and the rows after the call.

        The first call builds the envs: of errors of the constructor, Ray would return only the text.

        Args:
            call: called with this object; a method, for example.
            rows: that the latest answer has returned; None for the first call.
            *args: further arguments of the call.
        """
        if self.env is None:
            self._start(rows)
        result = call(self, *args)
        return result, f"{numbering.place}, pid {os.getpid()}", self.rows

    def _start(self, rows: TensorDictBase | None) -> None:
        """Start the workers and build the envs.

        Args:
            rows: of an actor before this one, which was lost; None if there was none. Each env that was in an episode
                there begins with an interrupted row, and has new episodes then.
        """
        try:
            how = pickle.loads(self._sent)
        except Exception as error:  # whatever the factories' modules and classes raise
            raise ClusterError(
                f"RayRollouts failed: expected {numbering.place} to read the factories, got {type(error).__name__}: "
                f"{error}. Install there what they import, or pass runtime_env=."
            ) from error
        self.env = ParallelEnv(**how)
        torch.manual_seed(
            episode_seed(self.env.seed, _STREAM, how["options"].first_env_id)
        )
        if rows is not None:
            self.rows = rows
            roots = [row.to_dict() for row in rows.unbind(0)]
            ended = np.array([bool(root["done"].any()) for root in roots])
            self.env.engine.take_over(roots, ended)

    def roll(self, how: Mapping[str, Any]) -> TensorDictBase:
        """Make a rollout.

        Args:
            how: the arguments of `rollout`; `policy` as Ray's references of the policy and of its weights, or None.
                Without `tensordict`, the policy continues with its own state after the latest rollout.
        """
        sent = how["policy"]
        own = {
            "tensordict": self.rows,
            **how,
            "policy": None if sent is None else _weighted(*sent),
        }
        data = self.env.rollout(break_when_any_done=False, **own)
        self.rows = data[:, -1]["next"].clone()
        return data

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state; see `RayRollouts.state_dict`."""
        self.env.load_state_dict(state)
        torch.set_rng_state(state["torch"].clone())
        self.rows = None


@functools.lru_cache(maxsize=1)
def _made(policy: Any) -> Placed:
    """Return the policy of a reference; fetched and built once."""
    return Placed(pickle.loads(ray.get(policy))())


@functools.lru_cache(maxsize=1)
def _weighted(policy: Any, weights: Any) -> Placed:
    """Return the policy with the weights of another reference; what this process lacks is fetched."""
    placed = _made(policy)
    sent = pickle.loads(ray.get(weights))
    # A policy that is no module has none.
    if sent:
        set_tensors(placed.policy, map(unpacked, sent))
    return placed


def packed(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype]:
    """Return a tensor of any device as what `unpacked` takes."""
    return as_array(tensor.cpu()), tensor.dtype


def unpacked(sent: tuple[np.ndarray, torch.dtype]) -> torch.Tensor:
    """Return a tensor on the CPU, in its own memory: Ray's is read-only."""
    return torch.tensor(sent[0], device="cpu").view(sent[1])
