"""The TorchRL facade's `AsyncEnvPool` over real workers."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.extras import skip_without

skip_without("torchrl")

import numpy as np
import pytest
import torch
import torchrl.envs
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, assert_close
from tensordict.nn import TensorDictModule
from torchrl.envs import StepCounter, TransformedEnv

from envherd.executor.facades.torchrl import AsyncEnvPool, ParallelEnv, SerialEnv, installed
from envherd.workers.errors import ActionError, EnvError, FactoryError
from tests import torchrl_own as own

pytestmark = [
    pytest.mark.slow,
    pytest.mark.preloads(*own.PRELOADED),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
NUM_ENVS = 4


class Gated(own.CountingEnv):
    """Waits in a step until a file exists; raises where the action is not 0 or 1."""

    def __init__(self, gate: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gate = gate

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if int(tensordict["action"].sum()) > 1:
            raise ArithmeticError("too much")
        while self.gate and not _exists(self.gate):
            time.sleep(0.001)
        return super()._step(tensordict)


def _exists(path: str) -> bool:
    import os

    return os.path.exists(path)


def counting(max_steps: int = 3) -> own.CountingEnv:
    return own.CountingEnv(max_steps=max_steps)


@pytest.fixture(scope="module")
def pool() -> Iterator[AsyncEnvPool]:
    env = AsyncEnvPool([counting] * NUM_ENVS)
    yield env
    env.close()


@pytest.fixture
def idle(pool: AsyncEnvPool) -> Iterator[AsyncEnvPool]:
    """The pool with all envs reset and its counts cleared."""
    pool.reset()
    pool.stats(reset=True)
    yield pool
    assert pool.stats()["batches"] >= 0


def acting(root: TensorDictBase) -> TensorDictBase:
    return root.set("action", torch.ones(*root.batch_size, 1, dtype=torch.int8))


def test_it_is_torchrls_to_isinstance_and_its_specs_fit(pool: AsyncEnvPool) -> None:
    assert isinstance(pool, torchrl.envs.AsyncEnvPool)
    assert (pool.num_envs, pool.batch_size, pool.resolved_exchange) == (4, torch.Size([4]), "shm")
    assert {"observation", "action", ("next", "reward")} <= set(pool.exchange_keys)
    assert pool.env_batch_sizes == [torch.Size([])] * 4
    pool.check_env_specs(break_when_any_done="both")
    TransformedEnv(pool, StepCounter()).check_env_specs(break_when_any_done="both")


def test_rows_are_those_of_a_serial_env(idle: AsyncEnvPool) -> None:
    serial = SerialEnv(NUM_ENVS, [counting] * NUM_ENVS)
    root, expected_root = idle.reset(), serial.reset()
    for _ in range(9):
        stepped, root = idle.step_and_maybe_reset(acting(root))
        expected, expected_root = serial.step_and_maybe_reset(acting(expected_root))
        assert_close(stepped.get("next"), expected.get("next"))
        assert_close(root.exclude("env_index", "action"), expected_root.exclude("action"))
    serial.close()


def test_some_envs_are_sent_and_received(idle: AsyncEnvPool) -> None:
    idle.async_step_send(acting(idle.reset()[[1, 3]]))
    batch = idle.async_step_recv(2)
    assert batch["env_index"] == [1, 3]
    assert batch["observation"].flatten().tolist() == [0, 0]
    assert batch["next", "observation"].flatten().tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="Cannot await 1 step when only 0 were sent"):
        idle.async_step_recv(1)


def test_what_was_sent_is_copied_and_what_is_received_is_owned(idle: AsyncEnvPool) -> None:
    sent = acting(idle.reset()).set("own", torch.arange(4))
    idle.async_step_and_maybe_reset_send(sent)
    sent["own"].zero_()
    first, root = idle.async_step_and_maybe_reset_recv(4)
    before = first.clone()
    assert first["own"].tolist() == root["own"].tolist() == [0, 1, 2, 3]
    idle.step_and_maybe_reset(acting(root))
    assert_close(first.exclude("env_index"), before.exclude("env_index"))


def test_a_reset_of_some_leaves_the_others(idle: AsyncEnvPool) -> None:
    idle.step(acting(idle.reset()))
    idle.async_reset_send(env_index=[2])
    assert idle.async_reset_recv(1)["observation"].item() == 0
    stepped = idle.step(acting(idle.fake_tensordict().exclude("next")))
    assert stepped["next", "observation"].flatten().tolist() == [2, 2, 1, 2]


def test_resets_are_given_what_is_in_the_row(idle: AsyncEnvPool) -> None:
    idle.async_reset_send(TensorDict({"own": torch.ones(2)}, [2]), env_index=[0, 1])
    batch = idle.async_reset_recv(2)
    assert batch["own"].tolist() == [1, 1]
    assert batch["observation"].tolist() == [[0], [0]]


def test_an_env_that_was_sent_is_refused_until_it_is_received(idle: AsyncEnvPool) -> None:
    root = acting(idle.reset())
    idle.async_step_send(root[:2])
    with pytest.raises(RuntimeError, match="still processing"):
        idle.async_step_send(root[1:])
    assert idle.async_step_recv(2)["env_index"] == [0, 1]


def test_arguments_that_do_not_fit_are_refused(idle: AsyncEnvPool) -> None:
    idle.async_step_send(acting(idle.reset()))
    with pytest.raises(ValueError, match="max_get"):
        idle.async_step_recv(2, max_get=1)
    with pytest.raises(ValueError, match="min_get"):
        idle.async_step_recv(0)
    with pytest.raises(ValueError, match="timeout"):
        idle.async_step_recv(1, timeout=-1.0)
    assert len(idle.async_step_recv(1, max_get=1)) == 1
    assert len(idle.async_step_recv(3, max_get=4)) == 3
    with pytest.raises(ValueError, match="expected 2 rows"):
        idle.async_step_send(idle.reset()[:1], env_index=[0, 1])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"backend": "asyncio"}, "backend"),
        ({"stack": "tall"}, "stack"),
        ({"exchange": "pipe"}, "exchange"),
        ({"envs_per_worker": 0}, "envs_per_worker"),
        ({"create_env_kwargs": [{}]}, "env_kwargs failed: expected 2 dicts"),
        ({"worker_affinity": [[0, 1]]}, "worker_affinity"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_starts(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncEnvPool([counting] * 2, **kwargs)


def test_in_a_block_torchrl_has_these_classes() -> None:
    before = torchrl.envs.ParallelEnv
    with installed():
        assert (torchrl.envs.ParallelEnv, torchrl.envs.SerialEnv) == (ParallelEnv, SerialEnv)
        assert (torchrl.envs.AsyncEnvPool, torchrl.envs.batched_envs.ParallelEnv) == (AsyncEnvPool, ParallelEnv)
    assert torchrl.envs.ParallelEnv is torchrl.envs.batched_envs.ParallelEnv is before is not ParallelEnv


def test_an_env_in_place_of_a_factory_is_refused() -> None:
    with pytest.raises(FactoryError, match="expected a callable"):
        AsyncEnvPool([counting()])


def test_statistics_count_batches(idle: AsyncEnvPool) -> None:
    idle.async_reset_send(env_index=list(range(4)))
    first = idle.async_reset_recv(min_get=1, max_get=1)
    rest = idle.async_reset_recv(min_get=3, max_get=6)
    assert (len(first), len(rest)) == (1, 3)
    idle.step(acting(idle.reset()))
    idle.async_step_send(acting(idle.fake_tensordict().exclude("next")), env_index=list(range(4)))
    counts = idle.stats(reset=True)
    assert (counts["batches"], counts["items"], counts["avg_batch_size"]) == (4, 12, 3)
    assert counts["batch_fill_ratio"] == pytest.approx(12 / 15)
    assert counts["partial_batch_fraction"] == pytest.approx(1 / 4)
    assert counts["avg_observation_to_batch_ms"] > 0
    assert counts["avg_batch_to_action_ms"] > 0
    assert 0 < counts["consumer_busy_fraction"] <= 1
    idle.async_step_recv(4)
    assert idle.stats()["batches"] == 1


def test_threads_step_an_env_each(idle: AsyncEnvPool) -> None:
    counted: dict[int, list[int]] = {}

    def drive(env_id: int) -> None:
        idle.async_reset_send(env_index=env_id)
        root, seen = idle.async_reset_recv(env_index=env_id), []
        for _ in range(40):
            idle.async_step_and_maybe_reset_send(acting(root), env_index=env_id)
            stepped, root = idle.async_step_and_maybe_reset_recv(env_index=env_id)
            assert stepped["env_index"] == env_id
            seen.append(int(stepped["next", "observation"]))
        counted[env_id] = seen

    threads = [threading.Thread(target=drive, args=(i,)) for i in range(NUM_ENVS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counted == dict.fromkeys(range(NUM_ENVS), [1, 2, 3, 4] * 10)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def mixed(gate: Any) -> Iterator[AsyncEnvPool]:
    """Env 0 raises on request; env 1 waits for the gate; env 2 has a text; env 3 is a batch of another shape."""
    makers = [Gated, Gated, own.CountingEnvWithString, own.NestedCountingEnv]
    kwargs: list[dict[str, Any]] = [{}, {"gate": str(gate)}, {}, {}]
    env = AsyncEnvPool(makers, stack="lazy", create_env_kwargs=kwargs, envs_per_worker=2)
    yield env
    env.close()


def test_unlike_envs_are_a_lazy_stack(mixed: AsyncEnvPool, gate: Any) -> None:
    gate.touch()
    assert (mixed.num_workers, mixed.resolved_exchange, mixed.exchange_keys) == (2, "queue", ())
    root = mixed.reset()
    assert isinstance(root, LazyStackedTensorDict)
    with pytest.raises(ActionError, match="action"):
        mixed.async_step_send(root)
    for row in root.unbind(0)[:3]:
        row.set("action", torch.ones(1, dtype=torch.int8))
    root[3].set(("data", "action"), torch.ones(3, 1, dtype=torch.int8))
    stepped, following = mixed.step_and_maybe_reset(root)
    assert isinstance(stepped[2]["next", "string"], str)
    assert following[2]["string"] == stepped[2]["next", "string"]
    assert following[2].get("reward", None) is None
    assert [int(stepped[i]["next", "observation"]) for i in (0, 1, 2)] == [1, 1, 1]
    assert stepped[3]["next", "data", "states"].flatten().tolist() == [1, 1, 1]
    gate.unlink()


def test_an_env_that_waits_or_raises_holds_up_no_other(mixed: AsyncEnvPool, gate: Any) -> None:
    failures: list[Exception] = []
    mixed.async_reset_send(env_index=[0, 1, 2])
    roots = mixed.async_reset_recv(3)

    def drive(env_id: int, action: int) -> None:
        root = roots[env_id].exclude("env_index").set("action", torch.tensor([action], dtype=torch.int8))
        mixed.async_step_send(root, env_index=env_id)
        try:
            mixed.async_step_recv(env_index=env_id)
        except EnvError as error:
            failures.append(error)

    waiting = threading.Thread(target=drive, args=(1, 1))
    waiting.start()
    drive(0, 2)
    drive(2, 1)
    assert waiting.is_alive()
    assert len(failures) == 1
    assert "too much" in str(failures[0])
    gate.touch()
    waiting.join(30)
    assert not waiting.is_alive()
    mixed.async_reset_send(env_index=0)
    assert int(mixed.async_reset_recv(env_index=0)["observation"]) == 0
    gate.unlink()


def test_an_env_that_fails_while_another_is_received_loses_nothing(
    mixed: AsyncEnvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed.async_reset_send(env_index=[0, 2])
    rows = [row.exclude("env_index") for row in mixed.async_reset_recv(2).unbind(0)]
    for row, action in zip(rows, (2, 1), strict=True):  # env 0 raises
        mixed.async_step_send(
            row.set("action", torch.tensor([action], dtype=torch.int8)).unsqueeze(0), [0 if action == 2 else 2]
        )
    answered = mixed._crew.pool.wait_some(np.array([0, 2]), 2, None)
    assert len(answered) == 2
    with monkeypatch.context() as patch:  # env 2 was found ready before env 0 failed
        patch.setattr(mixed._sent, "wait", lambda *_: [2])
        assert mixed.async_step_recv(1)["env_index"] == [2]
    with pytest.raises(EnvError, match="too much"):
        mixed.async_step_recv(1)
    mixed.async_reset_send(env_index=0)
    mixed.async_reset_recv(env_index=0)


@pytest.mark.parametrize("line", range(1, 40, 3))
def test_an_interrupt_leaves_no_env_unknown(idle: AsyncEnvPool, line: int) -> None:
    root, left = acting(idle.reset()), line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if "async_" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        idle.async_step_send(root)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    try:
        assert idle.async_step_recv(4)["next", "observation"].flatten().tolist() == [1, 1, 1, 1]
    except RuntimeError as error:
        assert "only 0 were sent" in str(error)  # noqa: PT017
    assert len(idle.reset()) == 4
    other = threading.Thread(target=idle.stats)
    other.start()
    other.join(20)
    assert not other.is_alive(), "the pool is still held"


def test_a_timeout_of_zero_does_not_wait(mixed: AsyncEnvPool, gate: Any) -> None:
    """As in TorchRL 0.14.1; its tests look for the words `timed out`."""
    mixed.async_reset_send(env_index=[0, 1])
    roots = mixed.async_reset_recv(2)
    rows = [row.exclude("env_index").set("action", torch.ones(1, dtype=torch.int8)) for row in roots.unbind(0)]
    mixed.async_step_send(torch.stack(rows), env_index=[0, 1])
    began = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            ready = mixed.async_step_recv(1, max_get=2, timeout=0.0)
            break
        assert time.monotonic() < began + 60
    assert ready["env_index"] == [0]
    with pytest.raises(TimeoutError, match=r"async_step_recv timed out: expected 1 envs within 0 s, got 0"):
        mixed.async_step_recv(1, timeout=0)
    gate.touch()
    assert mixed.async_step_recv(1)["env_index"] == [1]
    gate.unlink()


def test_too_few_in_time_is_a_timeout_and_loses_nothing(mixed: AsyncEnvPool, gate: Any) -> None:
    mixed.async_reset_send(env_index=[0, 1])
    roots = mixed.async_reset_recv(2)
    rows = [row.exclude("env_index").set("action", torch.ones(1, dtype=torch.int8)) for row in roots.unbind(0)]
    mixed.async_step_send(torch.stack(rows), env_index=[0, 1])
    with pytest.raises(TimeoutError, match="Nothing is lost"):
        mixed.async_step_recv(2, timeout=0.05)
    assert mixed.async_step_recv(1, max_get=2, timeout=0.05)["env_index"] == [0]
    gate.touch()
    assert mixed.async_step_recv(1)["env_index"] == [1]
    gate.unlink()


def test_shared_memory_is_refused_for_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="exchange='shm'"):
        AsyncEnvPool([own.CountingEnvWithString], exchange="shm")


@own.since((0, 14), "AsyncBatchedCollector with these arguments")
@pytest.mark.parametrize("exchange", ["shm", "queue"])
def test_torchrls_collector_takes_it(monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    from torchrl.collectors import AsyncBatchedCollector, _async_batched

    pools = []

    def make(*args: Any, **kwargs: Any) -> AsyncEnvPool:
        pools.append(AsyncEnvPool(*args, **kwargs))
        return pools[0]

    monkeypatch.setattr(_async_batched, "AsyncEnvPool", make)
    if exchange == "queue":  # a thread for each env
        monkeypatch.setattr(AsyncEnvPool, "resolved_exchange", "queue")
    policy = TensorDictModule(lambda seen: torch.ones_like(seen, dtype=torch.int8), ["observation"], ["action"])
    collector = AsyncBatchedCollector(
        [counting] * 2, policy=policy, frames_per_batch=20, total_frames=60, env_backend="multiprocessing"
    )
    seen: dict[int, list[int]] = {0: [], 1: []}
    for batch in collector:
        for row in batch.reshape(-1).unbind(0):
            seen[int(row["env_index"])].append(int(row["next", "observation"]))
    collector.shutdown()
    assert len(pools) == 1
    assert sum(map(len, seen.values())) >= 60
    for values in seen.values():
        assert values == ([1, 2, 3, 4] * len(values))[: len(values)]
