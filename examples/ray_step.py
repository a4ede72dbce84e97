"""One batch over several machines: the same script as for one machine, with another executor.

What it shows: `RayParallelEnv` has the methods and the data of `ParallelEnv`. Pass the address of a cluster, or none to
try it on two nodes that are started on this machine.

Run: python examples/ray_step.py [--address HOST:PORT]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import gymnasium
import ray
import torch
from ray.cluster_utils import Cluster

from envherd import ParallelEnv, RayParallelEnv

NUM_ENVS, NUM_STEPS = 6, 50


@contextlib.contextmanager
def some_cluster(address: str | None) -> Iterator[str]:
    """Yield the address of a cluster: the argument, or one with two nodes on this machine."""
    if address is not None:
        yield address
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def make_env() -> gymnasium.Env:
    """Build one env; called on its node."""
    return gymnasium.make("CartPole-v1")


def main() -> None:
    """Step a batch over two nodes, and the same batch on this machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    with some_cluster(parser.parse_args().address) as address:
        with RayParallelEnv(
            NUM_ENVS, make_env, num_nodes=2, resources_per_node={"CPU": 1}, address=address, seed=0
        ) as env:
            print(f"{env.envs_per_node} envs on {len(env.nodes)} nodes")
            far = env.rollout(NUM_STEPS, break_when_any_done=False)
        with ParallelEnv(NUM_ENVS, make_env, num_workers=2, seed=0) as env:
            near = env.rollout(NUM_STEPS, break_when_any_done=False)
    same = all(torch.equal(far[key], near[key]) for key in ("observation", "action", ("next", "done")))
    print(f"{tuple(far.shape)} transitions, {int(far['next', 'done'].sum())} episodes; as on one machine: {same}")


if __name__ == "__main__":
    main()
