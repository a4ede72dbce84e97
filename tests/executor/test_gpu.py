"""Batches, policies, simulators and facades on a GPU; all of these tests need one."""

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule, TensorDictModule

from envherd.executor import (
    AsyncCollector,
    Collector,
    ExecutorOptions,
    ParallelEnv,
    SerialEnv,
)
from envherd.executor.batches.transfer import to_device
from envherd.executor.doctor import gpus
from envherd.executor.machine.gpus import read_gpus
from envherd.executor.machine.machine import read_machine
from envherd.executor.rollouts.policy_state import leaf_keys
from envherd.workers.testing import CountingEnv
from tests.envs.counting_envs import AgentsEnv
from tests.executor.batches.test_loans import assert_saved_as_held
from tests.extras import needs

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.preloads(),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compiler
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # When the first graph is made.
    pytest.mark.filterwarnings("ignore:Tensordict is registered in PyTree"),
    pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU"),
]

NUM_ENVS = 6
#: Clock cycles for which a stream is kept busy: some 0.1 s.
BUSY = 200_000_000
kinds = pytest.mark.parametrize(
    "kind", [SerialEnv, functools.partial(ParallelEnv, num_workers=2)]
)


class Pages(gymnasium.Env[np.ndarray, int]):
    """Observes 1 MiB of the number of its steps, modulo 251; episodes of 7 steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (1024, 1024), np.uint8)
    action_space: Any = gymnasium.spaces.Discrete(3)

    def __init__(self) -> None:
        self.num_steps = self.since_reset = 0

    def _observe(self) -> np.ndarray:
        return np.full((1024, 1024), self.num_steps % 251, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.since_reset = 0
        return self._observe(), {}

    def step(self, action: int) -> Any:
        del action
        self.num_steps += 1
        self.since_reset += 1
        return self._observe(), float(self.num_steps), self.since_reset == 7, False, {}


class Net(torch.nn.Module):
    """Acts by the sum of its observation; remembers the sum of its actions, and gives its device's value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(
        self, observation: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        total = observation.double().flatten(1).sum(1) * self.scale
        action = total.long() % 2 + 1
        return action, total, memory + action.double().unsqueeze(-1)


def recurrent(*, is_graph: bool, device: str = "cuda") -> Any:
    """Return a recurrent policy, which runs as a CUDA graph if `is_graph`: its results are in memory that it reuses."""
    module = TensorDictModule(
        Net().to(device).requires_grad_(requires_grad=False),
        in_keys=["observation", "memory"],
        out_keys=["action", "value", ("next", "memory")],
    )
    return CudaGraphModule(module, warmup=2) if is_graph else module


def primer(num_envs: int = NUM_ENVS) -> TensorDict:
    return TensorDict(
        {"memory": torch.zeros(num_envs, 1, dtype=torch.double)}, [num_envs]
    )


def only_own_input(policy: Any) -> Any:
    """Return the policy behind a call that hands it only what it reads, in a batch without other leaves."""

    def act(td: Any) -> Any:
        read = TensorDict(
            {"observation": td["observation"], "memory": td["memory"]},
            td.batch_size,
            device=td.device,
        )
        return td.update(policy(read).select("action", "value", ("next", "memory")))

    return act


def same(one: Any, other: Any) -> None:
    """Assert that two batches have the same leaves, dtypes and values."""
    one, other = one.cpu(), other.cpu()
    assert sorted(map(str, leaf_keys(one))) == sorted(map(str, leaf_keys(other)))
    for key in leaf_keys(one):
        assert one[key].dtype == other[key].dtype
        assert torch.equal(one[key], other[key]), key


@pytest.fixture(scope="module")
def compiler():
    """Let torch's compiler open what it keeps open, before a test looks for what is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes that stay
        for mode in ("default", "reduce-overhead"):
            run = torch.compile(lambda x: (x * 2).sum(1), dynamic=False, mode=mode)
            for _ in range(4):
                run(torch.ones(2, 3, device="cuda")).clone()
        torch.cuda.synchronize()
        yield


def keep_busy() -> Any:
    """Keep the default stream busy for some seconds; return an event that comes after that."""
    torch.cuda._sleep(20 * BUSY)
    ends = torch.cuda.Event()
    ends.record()
    return ends


# ---- batches -----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("make_env", [CountingEnv, AgentsEnv])
def test_steps_resets_and_messages_are_those_on_the_cpu(kind, make_env):
    with (
        kind(NUM_ENVS, make_env, seed=0, device="cuda") as env,
        kind(NUM_ENVS, make_env, seed=0) as on_cpu,
    ):
        same(env.reset(), on_cpu.reset())
        for turn in range(8):
            drawn = on_cpu.rand_action(on_cpu.current())
            given = drawn.select(*[leaf.key for leaf in on_cpu.action_spec])
            stepped = on_cpu.step(drawn)
            same(env.step(given.cuda() if turn % 2 else given)["next"], stepped["next"])
            mask = stepped["next", "done"].reshape(NUM_ENVS, -1).any(1)
            mask[turn % NUM_ENVS] = True
            reset = TensorDict({"_reset": mask}, [NUM_ENVS])
            same(env.reset(reset), on_cpu.reset(reset))
            some = [turn % NUM_ENVS, (turn + 2) % NUM_ENVS]
            drawn = on_cpu.rand_action(on_cpu.current(some))
            on_cpu.send(drawn, env_ids=some)
            env.send(
                drawn.select(*[leaf.key for leaf in on_cpu.action_spec]).cuda(),
                env_ids=some,
            )
            same(env.recv(2)["next"], on_cpu.recv(2)["next"])
            drawn = on_cpu.rand_action(on_cpu.current())
            stepped, root = on_cpu.step_and_maybe_reset(drawn)
            found, after = env.step_and_maybe_reset(
                drawn.select(*[leaf.key for leaf in on_cpu.action_spec])
            )
            same(found["next"], stepped["next"])
            same(after, root)
            assert after.device.type == found["next"].device.type == "cuda"
            assert_saved_as_held(
                [
                    batch[key]
                    for batch in (found["next"], after)
                    for key in leaf_keys(batch)
                ]
            )


@kinds
def test_rows_are_not_overwritten_before_their_transfer_ends(kind):
    """The stream is busy, so transfers begin long after the workers went on."""
    with kind(NUM_ENVS, Pages, seed=0, device="cuda") as env:
        stepped = []
        env.reset()
        for _ in range(20):
            torch.cuda._sleep(BUSY // 20)
            td, _ = env.step_and_maybe_reset(env.rand_action(env.current()))
            stepped.append(td["next"])
        for step, following in enumerate(stepped, 1):
            assert (following["observation"] == step % 251).all()
            assert (following["reward"] == step).all()


def test_a_transfer_under_way_survives_closing():
    env = ParallelEnv(NUM_ENVS, Pages, num_workers=2, device="cuda")
    env.reset()
    keep_busy()
    td = env.step(env.rand_action())
    env.close()
    assert (td["next", "observation"] == 1).all()


def test_executors_come_and_go():
    """Memory of the slab is unlocked with each, so that another can lock the same addresses."""
    for _ in range(8):
        with ParallelEnv(2, Pages, num_workers=1, device="cuda") as env:
            env.reset()
            assert (env.step(env.rand_action())["next", "observation"] == 1).all()
            assert env._engine.batches.mover._unpin is not None


@pytest.mark.parametrize("start_method", ["zygote", "spawn"])
def test_workers_start_after_the_caller_has_used_the_gpu(start_method):
    torch.zeros(1, device="cuda")
    options = ExecutorOptions(start_method=start_method)
    with ParallelEnv(
        2, CountingEnv, num_workers=2, device="cuda", options=options
    ) as env:
        assert env.rollout(5, break_when_any_done=False)["next", "observation"].is_cuda


class OnGpu(Pages):
    """Computes its observation on the GPU."""

    def _observe(self) -> np.ndarray:
        number = torch.full(
            (1,), self.num_steps % 251, device="cuda", dtype=torch.uint8
        )
        return number.expand(1024, 1024).cpu().numpy()


@pytest.mark.parametrize("start_method", ["zygote", "spawn"])
def test_workers_use_the_gpu_though_the_helper_asks_for_it(start_method):
    """The helper imports a module that asks whether there is a GPU, as many libraries do."""
    options = ExecutorOptions(
        start_method=start_method, preload=("tests.envs.asks_for_gpu",)
    )
    with ParallelEnv(2, OnGpu, num_workers=2, options=options) as env:
        env.reset()
        assert (env.step(env.rand_action())["next", "observation"] == 1).all()


# ---- policies ----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_rollouts_with_a_policy_that_reuses_its_memory(kind, is_graph, device):
    """The same data as on the CPU, from a policy whose CUDA graph writes each result where it wrote the last."""
    with kind(NUM_ENVS, CountingEnv, seed=0) as env:
        expected = env.rollout(
            12,
            recurrent(is_graph=False, device="cpu"),
            primer=primer(),
            break_when_any_done=False,
        )
    assert expected["next", "done"].any()
    assert expected["value"].unique().numel() > 3
    policy = only_own_input(recurrent(is_graph=is_graph))
    with kind(NUM_ENVS, CountingEnv, seed=0, device=device) as env:
        if device is None:
            with Collector(
                env, on_gpu(policy), frames_per_batch=12 * NUM_ENVS, primer=primer()
            ) as collector:
                found = collector.collect()
        else:
            found = env.rollout(
                12, policy, primer=primer().cuda(), break_when_any_done=False
            )
    same(found, expected)


@kinds
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_an_asynchronous_collector_of_batches_on_a_gpu(kind, layout):
    """The rows, with a recurrent policy on the GPU, are those on the CPU."""
    found = []
    for device in ("cpu", "cuda"):
        env = kind(NUM_ENVS, CountingEnv, seed=0, device=device)
        policy = recurrent(is_graph=False, device=device)
        with AsyncCollector(
            env,
            policy,
            frames_per_batch=60,
            layout=layout,
            primer=primer(),
            batch_sizes=(2, NUM_ENVS),
        ) as collector:
            flat = torch.cat([collector.collect() for _ in range(3)]).reshape(-1)
        found.append(
            {(int(row["env_ids"]), int(row["step"])): row for row in flat.unbind(0)}
        )
    shared = found[0].keys() & found[1].keys()
    assert len(shared) > 60
    for key in shared:
        same(found[0][key], found[1][key])


def on_gpu(policy: Any) -> Any:
    """Return a policy for batches on the CPU that runs on the GPU."""

    def act(td: Any) -> Any:
        acted = policy(to_device(td, "cuda")).select(
            "action", "value", ("next", "memory")
        )
        return td.update(acted.cpu())

    return act


#: torch's graphs raise an AssertionError in threads before that: https://github.com/pytorch/pytorch/issues/123177.
GRAPHS_IN_THREADS = (2, 13)


@pytest.mark.parametrize("in_background", [0, 1])
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.usefixtures("compiler")
def test_a_policy_is_compiled_once_for_each_size(in_background, mode):
    """An asynchronous collector calls it with two sizes alone, whatever number of envs is ready."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if mode == "reduce-overhead" and in_background and version < GRAPHS_IN_THREADS:
        pytest.skip("this torch runs no CUDA graphs of its compiler in threads")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = (
        Compilable()
        if mode is None
        else torch.compile(Compilable(), dynamic=False, mode=mode)
    )
    env = ParallelEnv(NUM_ENVS, Waits, num_workers=2, seed=0)
    with AsyncCollector(
        env,
        TensorDictModule(net, in_keys=["observation"], out_keys=["action", "value"]),
        frames_per_batch=120,
        batch_sizes=(2, NUM_ENVS),
        policy_device="cuda",
        in_background=in_background,
    ) as collector:
        for _ in range(4):
            data = collector.collect()
            value = data["observation"].double().flatten(2).sum(2)
            assert torch.equal(data["value"].double(), value)
            assert torch.equal(data["action"], value.long() % 2)
        assert set(collector.statistics().batch_sizes) <= set(range(1, NUM_ENVS + 1))
    if mode is not None:
        assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


class Compilable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = observation.flatten(1).sum(1) * self.scale
        return total.long() % 2, total


class Waits(gymnasium.Env[np.ndarray, int]):
    """Observes its number of steps, and now and then takes long."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (3,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.full(3, self.count, np.float32), {}

    def step(self, action: int) -> Any:
        del action
        self.count += 1
        if self.np_random.random() < 0.2:
            np.linalg.svd(self.np_random.random((60, 60)))
        return np.full(3, self.count, np.float32), 1.0, self.count == 9, False, {}


def test_a_thread_that_collects_does_not_wait_for_the_learner():
    """It waits only where weights are written: when it is made, and in `update_policy_`."""
    env = SerialEnv(NUM_ENVS, Waits, seed=0)
    with AsyncCollector(
        env,
        TensorDictModule(
            Compilable(), in_keys=["observation"], out_keys=["action", "value"]
        ),
        frames_per_batch=60,
        policy_device="cuda",
        in_background=1,
    ) as collector:
        for _ in range(3):
            collector.collect()
        ends = keep_busy()
        for _ in range(3):
            data = collector.collect()
            assert torch.equal(data["action"], data["value"].long() % 2)
        assert not ends.query()
    torch.cuda.synchronize()


# ---- simulators --------------------------------------------------------------------------------


@needs("vmas")
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_simulator_on_a_gpu(num_workers):
    """The rows are those of the same simulator without an executor."""
    from examples.vmas_simulator import VmasSimulator

    def make_env(device: str = "cuda") -> Any:
        return VmasSimulator("balance", 32, device, max_steps=5)

    kind = (
        functools.partial(ParallelEnv, num_workers=num_workers)
        if num_workers
        else SerialEnv
    )
    with kind(max(1, num_workers), make_env, seed=0, device="cuda") as env:
        data = env.rollout(12, break_when_any_done=False)
        assert data.device.type == "cuda"
        assert data["next", "done"].any()
        group = next(leaf.key for leaf in env.specs[0].reward)
        assert data["next"].get(group).isfinite().all()


# ---- the machine -------------------------------------------------------------------------------


def test_gpus_are_found():
    found = read_gpus()
    assert len(found) == torch.cuda.device_count()
    assert found[0].memory_bytes == pytest.approx(
        torch.cuda.get_device_properties(0).total_memory, rel=0.1
    )
    assert [finding.found.split(",")[0] for finding in gpus(read_machine())] == [
        gpu.name for gpu in found
    ]


# ---- facades -----------------------------------------------------------------------------------


@needs("torchrl")
@pytest.mark.parametrize("inner", ["cpu", "cuda"])
def test_the_facade_of_torchrl_gives_the_same_on_a_gpu(inner):
    """With envs on the CPU and on the GPU."""
    from envherd import torchrl as facades
    from tests.envs import torchrl_own

    def rolled(device: str, of_envs: str) -> Any:
        env = facades.ParallelEnv(
            3, lambda: torchrl_own.CountingEnv(device=of_envs), device=device
        )
        try:
            env.set_seed(0)
            ones = torch.ones(3, 1, device=device)
            return env.rollout(
                9, lambda td: td.set("action", ones), break_when_any_done=False
            )
        finally:
            env.close()

    found = rolled("cuda", inner)
    assert found.device.type == "cuda"
    same(found, rolled("cpu", "cpu"))


@needs("sb3")
def test_sb3_learns_on_a_gpu():
    from stable_baselines3 import PPO

    from envherd.sb3 import SubprocVecEnv

    env = SubprocVecEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    try:
        model = PPO(
            "MlpPolicy", env, device="cuda", n_steps=64, batch_size=64, n_epochs=1
        )
        model.learn(512)
        assert model.num_timesteps == 512
    finally:
        env.close()
