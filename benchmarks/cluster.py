"""The cost of a cluster: batches and remote rollouts over local nodes, compared with TorchRL's Ray collector.

All nodes are on this machine, so the numbers include no network, and the nodes share its processors. Only the driver's
processor time is meaningful.

Run: python -m benchmarks.cluster [--quick] [--write]    (to docs/reports/scaling.md)
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from tensordict import TensorDictBase
from torch import nn

from benchmarks import ROOT, rllib
from benchmarks.parts import write_part
from benchmarks.work import SteadyFactory
from envherd.executor import ParallelEnv
from envherd.executor.cluster import RayParallelEnv

NUM_ENVS, NUM_STEPS, CARTPOLE_STEPS = 8, 64, 128
LOCAL, ONE, TWO = "ParallelEnv", "RayParallelEnv, 1 node", "RayParallelEnv, 2 nodes"
STREAM, WHOLE, TORCHRL = "remote_rollouts().stream", "remote_rollouts().rollout", "TorchRL RayCollector"
RLLIB = "RLlib EnvRunnerGroup"
#: Bytes of an observation.
WORKLOADS = {"tiny": 16, "image": 84 * 84 * 4}


class Slot(NamedTuple):
    """The times of one slot: seconds of a call (median), and processor seconds of this process per call."""

    wall_s: float
    cpu_s: float


class Contender(NamedTuple):
    """A function to call, and the number of env-steps of a call."""

    call: Callable[[], Any]
    env_steps: int


def make_cartpole() -> gymnasium.Env[Any, Any]:
    """Build one CartPole."""
    return gymnasium.make("CartPole-v1")


class Policy(nn.Module):
    """Two layers over the observation, and the better action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Set the action."""
        return td.set("action", self.net(td["observation"]).argmax(-1))


@contextmanager
def two_nodes() -> Iterator[str]:
    """Start a cluster of a head and two nodes on this machine; yield its address."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so; else its processes stand back for others'
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=16, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def measure(contenders: dict[str, Contender], num_rounds: int, slot_s: float) -> dict[str, dict[str, Any]]:
    """Run contenders in turns in random order; return medians over rounds."""
    order, slots = random.Random(0), {name: list[Slot]() for name in contenders}
    for one in contenders.values():
        one.call()
    for _ in range(num_rounds):
        for name in order.sample(list(contenders), len(contenders)):
            slots[name].append(_run(contenders[name].call, slot_s))
    summary = {}
    for name, one in contenders.items():
        wall_s = statistics.median(slot.wall_s for slot in slots[name])
        summary[name] = {
            "wall_s": wall_s,
            "driver_cpu_s": statistics.median(slot.cpu_s for slot in slots[name]),
            "steps_per_s": one.env_steps / wall_s,
        }
    return summary


def _run(call: Callable[[], Any], slot_s: float) -> Slot:
    call()  # wakes its processes
    walls: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    while not walls or time.perf_counter() - began < slot_s:
        before = time.perf_counter()
        call()
        walls.append(time.perf_counter() - before)
    return Slot(statistics.median(walls), (time.process_time() - cpu) / len(walls))


def _stepping(env: Any) -> Contender:
    actions = torch.zeros(NUM_ENVS, dtype=torch.int64)
    root = env.reset()

    def step() -> None:
        nonlocal root
        _, root = env.step_and_maybe_reset(root.set("action", actions))

    return Contender(step, NUM_ENVS)


def batches(workload: str, num_rounds: int, slot_s: float) -> dict[str, dict[str, Any]]:
    """Measure batches and remote rollouts of no-op envs."""
    make_env = SteadyFactory((WORKLOADS[workload],), "uint8")
    over = functools.partial(RayParallelEnv, NUM_ENVS, make_env, seed=0)
    with ExitStack() as stack:
        local = stack.enter_context(ParallelEnv(NUM_ENVS, make_env, num_workers=2, seed=0))
        one = stack.enter_context(over(num_nodes=1, resources_per_node={"CPU": 4}, num_workers=2))
        two = stack.enter_context(over(num_nodes=2, resources_per_node={"CPU": 4}, num_workers=1))
        contenders = {name: _stepping(env) for name, env in ((LOCAL, local), (ONE, one), (TWO, two))}
        summary = measure(contenders, num_rounds, slot_s)
        rollouts = one.remote_rollouts()
        one_rollout = functools.partial(rollouts.rollout, NUM_STEPS, auto_reset=False)
        contender = {WHOLE: Contender(one_rollout, NUM_ENVS * NUM_STEPS)}
        summary |= measure(contender, num_rounds, slot_s)
        return summary


def rollouts_of_cartpole(num_rounds: int, slot_s: float) -> dict[str, dict[str, Any]]:
    """Measure remote rollouts of two nodes with four envs each, here, with TorchRL's Ray collector and with RLlib."""
    torch.manual_seed(0)
    policy = Policy()
    frames = NUM_ENVS * CARTPOLE_STEPS
    with ExitStack() as stack:
        how: dict[str, Any] = {"num_nodes": 2, "resources_per_node": {"CPU": 4}, "num_workers": 1, "seed": 0}
        streaming, whole = (stack.enter_context(RayParallelEnv(NUM_ENVS, make_cartpole, **how)) for _ in range(2))
        whole.reset()
        stream = streaming.remote_rollouts().stream(CARTPOLE_STEPS, policy)
        stack.callback(stream.close)
        collector = _torchrl_collector(policy, frames // 2)
        stack.callback(collector.shutdown, shutdown_ray=False)
        theirs = iter(collector)
        their_frames = next(theirs).numel()
        rollout = functools.partial(whole.remote_rollouts().rollout, CARTPOLE_STEPS, policy, auto_reset=False)
        contenders = {
            STREAM: Contender(lambda: next(stream), frames // 2),
            WHOLE: Contender(rollout, frames),
            TORCHRL: Contender(lambda: next(theirs), their_frames),
        }
        if rllib.is_there():
            sample, stop = rllib.start(2, NUM_ENVS // 2, CARTPOLE_STEPS)
            stack.callback(stop)
            contenders[RLLIB] = Contender(sample, sample())
        return measure(contenders, num_rounds, slot_s)


def _torchrl_env() -> Any:
    from torchrl.envs import GymWrapper, SerialEnv

    return SerialEnv(NUM_ENVS // 2, lambda: GymWrapper(make_cartpole(), categorical_action_encoding=True))


def _torchrl_collector(policy: Policy, frames_per_batch: int) -> Any:
    from torchrl.collectors.distributed import RayCollector

    return RayCollector(
        [_torchrl_env] * 2,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=10**12,
        remote_configs={"num_cpus": 4, "num_gpus": 0},
        sync=False,
    )


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if "model name" in line), "?")
    names = ("envherd", "ray", "torch", "tensordict", "torchrl", "numpy")
    packages = {name: metadata.version(name) for name in names}
    cores, load = len(os.sched_getaffinity(0)), psutil.getloadavg()[0]
    return {"cpu": model, "cores": cores, "load": load, "python": platform.python_version(), "packages": packages}


def measured_lines(results: dict[str, Any]) -> Iterator[str]:
    """Yield the measured tables as Markdown."""
    machine = results["machine"]
    yield (
        f"Measured {date.today():%d %b %Y} on {machine['cores']} cores of {machine['cpu']}, load "
        f"{machine['load']:.1f} before and {machine['load_after']:.1f} after, "
        f"{results['rounds']} rounds of {results['slot_s']:g} s slots; Ray "
        f"{machine['packages']['ray']}, TorchRL {machine['packages']['torchrl']}."
    )
    for name, title in (
        ("tiny", "Batches of 8 envs that do nothing, 16 bytes each"),
        ("image", "The same with 28 KB each"),
        ("cartpole", "Rollouts of 8 CartPoles on 2 nodes, the policy (two layers) next to the envs"),
    ):
        yield from (
            "",
            f"{title}:",
            "",
            "| | ms per call | driver's CPU ms per call | env-steps/s |",
            "|---|---|---|---|",
        )
        for contender, one in results[name].items():
            wall_ms, cpu_ms = one["wall_s"] * 1e3, one["driver_cpu_s"] * 1e3
            yield f"| {contender} | {wall_ms:,.2f} | {cpu_ms:,.2f} | {one['steps_per_s']:,.0f} |"


def main() -> None:
    """Measure and print; write the tables if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.3 s slots instead of 12 of 1 s")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/reports/scaling.md")
    arguments = parser.parse_args()
    plan = (3, 0.3) if arguments.quick else (12, 1.0)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine(), "rounds": plan[0], "slot_s": plan[1]}
    with two_nodes():
        for workload in WORKLOADS:
            results[workload] = batches(workload, *plan)
        results["cartpole"] = rollouts_of_cartpole(*plan)
    results["machine"]["load_after"] = psutil.getloadavg()[0]
    lines = [*measured_lines(results)]
    print("\n".join(lines))
    if arguments.write:
        write_part(ROOT / "docs/reports/scaling.md", "benchmarks/cluster.py", lines)


if __name__ == "__main__":
    main()
