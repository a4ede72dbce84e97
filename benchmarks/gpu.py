"""Batches and policies on a GPU: envherd compared with TorchRL and Gymnasium.

    python -m benchmarks.gpu batches      # a batch on the GPU after each step
    python -m benchmarks.gpu policies     # asynchronous collectors with a convolutional policy on the GPU
    python -m benchmarks.gpu learner      # collecting while the GPU learns

Needs a GPU, TorchRL and Gymnasium. The envs observe 84 x 84 x 4 bytes and compute for some time; see `Steady`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule, TensorDictModule

from benchmarks.asynchronous import choose, torchrls, wrapped, zeros
from benchmarks.work import Law, SteadyFactory, iterations_per_us
from envherd.executor import AsyncCollector, Collector, ParallelEnv

IMAGE = (84, 84, 4)
SMALL = (4,)


class Network(torch.nn.Module):
    """The network of Mnih et al. (2015) over images `[..., 84, 84, 4]` (uint8); returns actions `[...]` of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(4, 32, 8, 4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 4, 2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(64, 64, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(3136, 512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, 2),
        )

    def values(self, observation: torch.Tensor) -> torch.Tensor:
        """Return `[n, 2]` for `[n, 84, 84, 4]`."""
        values: torch.Tensor = self.layers(observation.float().permute(0, 3, 1, 2) / 255)
        return values

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the better actions."""
        lead = observation.shape[:-3]
        return self.values(observation.reshape(-1, *IMAGE)).argmax(-1).reshape(lead)


def policy() -> Any:
    """Return the network on the GPU as a policy."""
    net = Network().cuda().requires_grad_(requires_grad=False)
    return TensorDictModule(net, in_keys=["observation"], out_keys=["action"])


class Graphed:
    """Runs a policy as one CUDA graph for each size of batch."""

    def __init__(self) -> None:
        self._graphs: dict[int, Any] = {}
        self._policy = policy()

    def __call__(self, td: Any) -> Any:
        """Act."""
        if (graph := self._graphs.get(len(td))) is None:
            graph = self._graphs[len(td)] = CudaGraphModule(self._policy, warmup=2)
        read = TensorDict({"observation": td["observation"]}, td.batch_size, device=td.device)
        return td.set("action", graph(read)["action"].clone())


def make_env(us: float, shape: tuple[int, ...], law: Law = "even") -> SteadyFactory:
    """Return a factory of envs whose steps take a number of microseconds."""
    dtype = "uint8" if len(shape) > 1 else "float32"
    return SteadyFactory(shape, dtype, us * iterations_per_us(), law)


def _rate(turn: Callable[[], int], seconds: float) -> tuple[float, float]:
    """Return transitions per second, and the caller's processor time for each, in microseconds."""
    turn()
    turn()
    torch.cuda.synchronize()
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        count += turn()
    torch.cuda.synchronize()
    return count / (time.perf_counter() - began), (time.process_time() - cpu) / count * 1e6


def _print(*cells: Any) -> None:
    shown = [f"{cell:,.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(shown)} |", flush=True)


def _begin(*names: str) -> None:
    """Print the machine, and the head of a table."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    _print(*names)
    _print(*["---"] * len(names))


# ---- batches -----------------------------------------------------------------------------------


def _ours(make: Callable[[], Any], num_envs: int, num_workers: int, seconds: float, *, moves: bool) -> Any:
    kwargs: dict[str, Any] = {} if moves else {"device": "cuda"}
    with ParallelEnv(num_envs, make, num_workers=num_workers, **kwargs) as env:
        env.reset()
        action = TensorDict({"action": torch.zeros(num_envs, dtype=torch.int64, device="cuda")}, [num_envs])

        def turn() -> int:
            td, root = env.step_and_maybe_reset(action.copy())
            if moves:
                td, root = td.to("cuda"), root.to("cuda")
            del td, root
            return num_envs

        return _rate(turn, seconds)


def _torchrls(make: Callable[[], Any], num_envs: int, seconds: float, kind: Any, **kwargs: Any) -> Any:
    env = kind(num_envs, functools.partial(wrapped, make), device="cuda", **kwargs)
    try:
        root = env.reset()
        zeros = torch.zeros(num_envs, dtype=torch.int64, device="cuda")

        def turn() -> int:
            nonlocal root
            _, root = env.step_and_maybe_reset(root.set("action", zeros))
            return num_envs

        return _rate(turn, seconds)
    finally:
        env.close()


def _gymnasiums(make: Callable[[], Any], num_envs: int, seconds: float) -> Any:
    env = gymnasium.vector.AsyncVectorEnv([make] * num_envs)
    try:
        env.reset()
        action = torch.zeros(num_envs, dtype=torch.int64, device="cuda")

        def turn() -> int:
            for part in env.step(action.cpu().numpy())[:4]:
                torch.as_tensor(part, device="cuda")
            return num_envs

        return _rate(turn, seconds)
    finally:
        env.close()


def batches(seconds: float, num_workers: int) -> None:
    """Print the speed of steps whose batches and actions are on the GPU."""
    import torchrl.envs

    from envherd.executor.facades import torchrl as facade

    _begin("envs", "way", "transitions/s", "caller's us per transition")
    for name, num_envs, shape, us in (("8 free, 16 B", 8, SMALL, 0.0), ("32 of 200 us, 28 KB", 32, IMAGE, 200.0)):
        make = make_env(us, shape)
        _print(name, '`device="cuda"`', *_ours(make, num_envs, num_workers, seconds, moves=False))
        _print(name, '`.to("cuda")`', *_ours(make, num_envs, num_workers, seconds, moves=True))
        _print(name, "facade of TorchRL", *_torchrls(make, num_envs, seconds, facade.ParallelEnv))
        _print(name, "Gymnasium's AsyncVectorEnv", *_gymnasiums(make, num_envs, seconds))
        _print(name, "TorchRL's ParallelEnv", *_torchrls(make, num_envs, seconds, torchrl.envs.ParallelEnv))


# ---- policies ----------------------------------------------------------------------------------


def _collected(acting: Any, num_envs: int, num_workers: int, seconds: float, make: Any, **kwargs: Any) -> Any:
    env = ParallelEnv(num_envs, make, num_workers=num_workers)
    kwargs.setdefault("policy_device", "cuda")
    with AsyncCollector(env, acting, frames_per_batch=8 * num_envs, layout="flat", **kwargs) as collector:
        for _ in range(8):
            collector.collect()  # compiles
        before = collector.statistics()
        rate = _rate(lambda: len(collector.collect()), seconds)
        found = collector.statistics()
        calls = sum(found.batch_sizes.values()) - sum(before.batch_sizes.values())
        return *rate, (found.frames - before.frames) / calls, (found.policy_s - before.policy_s) / calls * 1e3


def _torchrls_collector(num_envs: int, seconds: float, make: Any, **kwargs: Any) -> Any:
    collector = torchrls(make, num_envs, 8 * num_envs, device="cuda", **kwargs)
    try:
        frames = iter(collector)
        next(frames)
        return _rate(lambda: next(frames).numel(), seconds)
    finally:
        collector.shutdown()


def policies(seconds: float, num_workers: int) -> None:
    """Print the speed of asynchronous collectors with a convolutional policy."""
    num_envs, sizes = 32, (8, 16, 32)
    make = make_env(1000.0, IMAGE, "lognormal")
    _begin("way", "transitions/s", "caller's us per transition", "envs a call", "ms a call")
    case = (num_envs, num_workers, seconds, make)
    _print("no policy", *_collected(zeros, *case, policy_device=None))
    _print("any size", *_collected(policy(), *case))
    _print(f"sizes {sizes}", *_collected(policy(), *case, batch_sizes=sizes))
    compiled = policy()
    compiled.module = torch.compile(compiled.module, dynamic=False)
    _print("sizes, `torch.compile`", *_collected(compiled, *case, batch_sizes=sizes))
    torch._dynamo.reset()  # noqa: SLF001
    reduced = policy()
    reduced.module = torch.compile(reduced.module, dynamic=False, mode="reduce-overhead")
    _print('sizes, `mode="reduce-overhead"`', *_collected(reduced, *case, batch_sizes=sizes))
    _print("sizes, `CudaGraphModule`", *_collected(Graphed(), *case, batch_sizes=sizes))
    _print("sizes, in background", *_collected(policy(), *case, batch_sizes=sizes, in_background=1))
    for count in (1, 4):
        found = _torchrls_collector(
            num_envs,
            seconds,
            make,
            policy=policy(),
            transport="driver",
            env_exchange="shm",
            envs_per_worker=count,
        )
        _print(f"TorchRL's, {count} per worker", *found, "", "")
    found = _torchrls_collector(num_envs, seconds, make, policy_factory=policy, transport="auto")
    _print("TorchRL's, server process", *found, "", "")


# ---- learner -----------------------------------------------------------------------------------


def _learned(collect: Callable[[], Any], update: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Return transitions per second and processor time of a loop that collects and learns."""
    net = Network().cuda()
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)

    def turn() -> int:
        data = collect()
        observation = data["observation"].reshape(-1, *IMAGE).cuda()
        for _ in range(4):
            optimizer.zero_grad()
            net.values(observation).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        update()
        return len(observation)

    return _rate(turn, seconds)


def learner(seconds: float, num_workers: int) -> None:
    """Print the speed of collecting and learning in turns, and at the same time."""
    num_envs = 32
    make = make_env(1000.0, IMAGE, "lognormal")
    _begin("collector", "transitions/s", "caller's us per transition")
    with Collector(
        ParallelEnv(num_envs, make, num_workers=num_workers, device="cuda"), policy(), frames_per_batch=64 * num_envs
    ) as collector:
        _print('`Collector`, `device="cuda"`', *_learned(collector.collect, lambda: None, seconds))
    for ahead in (0, 1):
        with AsyncCollector(
            ParallelEnv(num_envs, make, num_workers=num_workers),
            policy(),
            frames_per_batch=64 * num_envs,
            policy_device="cuda",
            in_background=ahead,
        ) as asynchronous:
            rates = _learned(asynchronous.collect, asynchronous.update_policy_, seconds)
            found = asynchronous.statistics()
            _print(f"`AsyncCollector`, `in_background={ahead}`", *rates)
            print(f"  bound by {found.bound_by}, lag {found.lag_mean:.2f}", flush=True)


TABLES = {"batches": batches, "policies": policies, "learner": learner}


if __name__ == "__main__":
    choose(__doc__, TABLES, seconds=3.0, workers=8)
