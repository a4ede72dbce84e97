"""Edge cases of send and receive: interleaved calls, failures, large messages."""

import functools
import itertools
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from envherd.executor import Busy, ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.batches import memory as batch_memory
from envherd.executor.rollouts.policy_state import AddedRows
from envherd.shm.sync import Doorbell
from envherd.workers import native
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.envs.counting_envs import TextEnv
from tests.envs.disturbing_envs import HaltingEnv
from tests.envs.sized_envs import SleepingEnv
from tests.executor.calls import ENDLESS, TWO_WORKERS, act, begun, both, ones
from tests.gates import Gate, wait_for

pytestmark = pytest.mark.slow


@both
def test_different_tasks_are_received_with_their_own_leaves(make):
    with begun(
        make(3, [CountingEnv, functools.partial(CountingEnv, size=3), CountingEnv])
    ) as env:
        env.send(act(env))
        assert env.recv()["action"].tolist() == [1, 1, 1]
        env.send(act(env)[:2], [1, 0])
        td = env.recv(env_ids=[1, 0], with_root=False)
        assert td.batch_size == (2,)
        assert [
            ("next", "pixels") in td[i].keys(include_nested=True) for i in range(2)
        ] == [True, False]
        assert not any(key in td[0] for key in ("observation", "action"))


def test_large_questions_meet_large_answers():
    """Both ends of a socket write more than its buffer holds: no deadlock."""

    class Measures(TextEnv):
        def measure(self, data: bytes) -> int:
            return len(data)

    with begun(
        ParallelEnv(
            2, functools.partial(Measures, 1_000_000, padding=2_000_000), num_workers=1
        )
    ) as env:
        assert env.call("measure", b"x" * 3_000_000) == [3_000_000] * 2
        env.send(act(env))
        assert env.call("measure", b"x" * 3_000_000) == [3_000_000] * 2
        assert len(env.recv()[0]["next", "text"]) > 2_000_000


@pytest.mark.parametrize("start_method", ["zygote", "portable"])
def test_closing_does_not_wait_for_what_was_sent(start_method):
    options = ExecutorOptions(start_method=start_method, close_timeout_s=60.0)
    env = ParallelEnv(
        200,
        functools.partial(FaultyEnv, "slow", step=1),
        num_workers=1,
        options=options,
    )
    env.reset()
    env.send(act(env))
    wait_for(lambda: env.statistics().workers[0].phase == "step")
    began = time.monotonic()
    env.close()
    assert time.monotonic() - began < 30, "one step of 0.3 s, not 200"


@pytest.mark.parametrize(
    "make",
    [
        SerialEnv,
        functools.partial(ParallelEnv, num_workers=1),
        TWO_WORKERS,
        functools.partial(
            ParallelEnv, num_workers=1, options=ExecutorOptions(env_threads=True)
        ),
    ],
    ids=["serial", "one worker", "two workers", "threads"],
)
def test_requests_between_send_and_receive_reach_an_env_after_its_step(make):
    with begun(make(3, ENDLESS, seed=0)) as env:
        for number in range(1, 40):
            ids = [0, 2] if number % 3 else [1]
            env.send(act(env)[: len(ids)], ids)
            env.set("num_steps", 1000 * number)
            assert env.get("num_steps") == [1000 * number] * 3
            with pytest.raises(
                Busy, match=r"still owe an answer\. recv\(\) them first"
            ):
                env.reset()
            with pytest.raises(Busy):
                env.state_dict()
            td = env.recv(len(ids))
            assert sorted(td["env_ids"].tolist()) == ids
            assert td["next", "observation"][:, 1].tolist() == [
                1000 * (number - 1) + 1
            ] * len(ids)


@pytest.mark.skipif(
    native.load() is None, reason="without the C extension each batch has new memory"
)
def test_receives_of_every_size_use_their_memory_again(monkeypatch):
    made = []
    monkeypatch.setattr(
        batch_memory,
        "BatchMemory",
        lambda *args, make=batch_memory.BatchMemory: (
            made.append(make(*args)) or made[-1]
        ),
    )
    with begun(ParallelEnv(8, ENDLESS, num_workers=2)) as env:
        env.send(act(env))
        for _ in range(10):
            for count in range(1, 9):
                env_ids = env.recv(count)["env_ids"]
                env.send(act(env)[:count], env_ids)
        env.recv()
    # For each size, of `next`, of what was sent, and of roots, where a look at the workers was due; of all roots.
    assert 0 < len(made) <= batch_memory.ReusedMemory.NUM_BLOCKS * (8 * 3 + 1)


@both
@pytest.mark.parametrize("ring_frames", [2, 3, 4])
def test_the_reset_after_a_step_does_not_overwrite_its_root(make, ring_frames):
    """Every step ends its episode, after resets in a row, and at each place of the ring."""
    with make(
        2,
        functools.partial(CountingEnv, 1),
        seed=0,
        options=ExecutorOptions(ring_frames=ring_frames),
    ) as env:
        for num_resets, is_loaded, _ in itertools.product(
            (1, 2, 3), (False, True), range(ring_frames + 1)
        ):
            for _ in range(num_resets):
                root = env.reset()
            env.send(env.rand_action(root))
            td = env.recv(env_ids=[0, 1])
            assert (td["observation"] == root["observation"]).all()
            if is_loaded:
                env.load_state_dict(env.state_dict())
            for _ in range(ring_frames):
                root = env.current()
                env.send(env.rand_action(root))
                td = env.recv(env_ids=[0, 1])
                assert (td["observation"] == root["observation"]).all()


@both
def test_current_is_equal_right_after_recv_and_later_and_after_writes(make):
    """Right after a `recv` by C, `current` shares the received leaves; all other calls gather rows."""
    with make(4, functools.partial(CountingEnv, 5), seed=0) as env:
        root = env.reset()
        is_in_c = env._exchange.fast is not None
        shared = []
        for _ in range(12):
            env.send(env.rand_action(root))
            td = env.recv()
            ids = td["env_ids"]
            at_once = env.current(ids)
            later = env.current(ids.tolist())
            assert sorted(at_once.keys()) == sorted(later.keys())
            assert (at_once == later).all()
            shared.append(
                at_once["observation"].data_ptr()
                == td["next", "observation"].data_ptr()
            )
            # A receive with a look at the workers, on a busy machine, is not one by C.
            assert not shared[-1] or (is_in_c and not td["next", "done"].any())
            assert (
                later["observation"].data_ptr() != td["next", "observation"].data_ptr()
            )
            root = at_once.clone()
            td["next", "observation"].zero_()
            assert (env.current(ids) == root).all()
        assert any(shared) == is_in_c
        env.send(env.rand_action(root))
        assert env.recv()["next", "observation"].count_nonzero() > 0
        assert td["next", "observation"].count_nonzero() == 0


@both
def test_envs_are_where_a_state_that_was_loaded_has_them(make):
    """The roots are not those of the envs received before."""
    with make(2, functools.partial(CountingEnv, 9), seed=0) as env:
        root = env.reset()
        state = env.state_dict()
        env.send(root.set("action", torch.tensor([0, 1])))
        env_ids = env.recv(env_ids=[0, 1])["env_ids"]
        env.load_state_dict(state)
        assert (
            env.current(env_ids).exclude("env_ids") == root.exclude("action", "next")
        ).all()


@both
@pytest.mark.parametrize(
    "as_written", [lambda ids: ids, lambda ids: ids.numpy(), np.from_dlpack]
)
def test_current_gathers_rows_anew_after_other_commands_and_writes_to_ids(
    make, as_written
):
    with make(3, functools.partial(CountingEnv, 100), seed=0) as env:
        root = env.reset()
        env.send(env.rand_action(root)[:2], [0, 1])
        td = env.recv(env_ids=[0, 1])
        env.reset(TensorDict({"_reset": torch.tensor([True, False, False])}, [3]))
        assert env.current(td["env_ids"])["observation"][:, 1].tolist() == [0, 1]
        env.send(env.rand_action(root)[:2], [1, 2])
        td = env.recv(env_ids=[1, 2])
        ids = td["env_ids"]
        assert ids.tolist() == [1, 2]
        as_written(ids)[0] = 0
        assert env.current(ids)["observation"][:, 1].tolist() == [0, 1]
        env.send(TensorDict({"action": torch.tensor([1, 1])}, [2]), ids)
        assert env.recv(env_ids=[0, 2])["env_ids"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "kwargs", "message"),
    [
        (
            (),
            {"env_ids": [1, 2]},
            r"expected envs that were sent, got envs \[2\] that were not",
        ),
        ((2,), {"env_ids": [1]}, "expected 1 to 1 envs"),
        ((2,), {"max_envs": 1}, "expected max_envs of at least 2"),
    ],
)
def test_recv_refuses_envs_that_were_not_sent_and_too_many(arguments, kwargs, message):
    with SerialEnv(3, functools.partial(CountingEnv, 100), seed=0) as env:
        env.send(env.rand_action(env.reset())[:2], [0, 1])
        with pytest.raises(ValueError, match=message):
            env.recv(*arguments, **kwargs)
        assert env.recv(env_ids=[1])["env_ids"].tolist() == [1]
        assert env.recv(1, env_ids=[0])["env_ids"].tolist() == [0]


def test_recv_gives_the_order_of_sends():
    with SerialEnv(3, functools.partial(CountingEnv, 100), seed=0) as env:
        td = env.rand_action(env.reset())
        for env_id in (2, 0, 1):
            env.send(td[env_id : env_id + 1], [env_id])
        assert env.recv(2)["env_ids"].tolist() == [2, 0]


def test_recv_of_some_envs_does_not_wait_for_others(tmp_path):
    gate = Gate(tmp_path)
    with ParallelEnv(
        2, [CountingEnv, functools.partial(HaltingEnv, gate, 1)], num_workers=2, seed=0
    ) as env:
        env.send(env.rand_action(env.reset()))
        assert env.recv(env_ids=[0])["env_ids"].tolist() == [0]
        with pytest.raises(TimeoutError, match="expected 1 envs within"):
            env.recv(env_ids=[1], timeout_s=0.01)
        gate.open()
        assert env.recv(env_ids=[1])["next", "observation"][:, 1].tolist() == [1]


@pytest.mark.quiet
def test_the_caller_is_woken_once_for_all_that_it_waits_for(monkeypatch):
    """Envs answer every 3 ms, and the caller has nothing to do before the last answer.

    A caller that checks at that moment may see an answer that is not counted yet, and is then woken once more.
    """
    rings, wait, counts = [], Doorbell.wait, []

    def watched_wait(bell, timeout_s=None):
        rings.append(wait(bell, timeout_s))
        return rings[-1]

    monkeypatch.setattr(Doorbell, "wait", watched_wait)
    # `tests/executor/pools/test_fast_commands.py` does this in C.
    monkeypatch.setattr(native, "find", lambda: (None, "this is a test"))
    with begun(ParallelEnv(8, SleepingEnv, num_workers=2, seed=0)) as env:
        for _ in range(9):
            env.send(act(env))
            rings.clear()
            assert len(env.recv(min_envs=6)) == 6
            counts.append(rings.count(True))
            assert env.recv()["env_ids"].numel() == 2
    # 0: a busy machine was so late that all answers were there.
    assert sorted(counts)[len(counts) // 2] <= 1


def test_tokens_of_answers_that_came_before_the_wait_do_not_pile_up(monkeypatch):
    """Without C, a command to all takes a token of each worker before it looks at the numbers."""
    monkeypatch.setattr(native, "find", lambda: (None, "this is a test"))
    with ParallelEnv(4, SleepingEnv, num_workers=2, seed=0) as env:
        for _ in range(9):
            flight = env._engine.flights.begin_resets(env._engine.all_ids)
            wait_for(env._pool.words.have_all_answered)
            flight.land()
        assert sum(iter(env._pool._done.try_wait, 0)) < 9


@both
def test_a_mask_says_which_envs_are_meant(make):
    with begun(make(3, CountingEnv, seed=0)) as env:
        for mask in (
            [True, False, True],
            np.array([True, False, True]),
            torch.tensor([True, False, True]),
        ):
            assert env.current(mask)["env_ids"].tolist() == [0, 2]
            assert len(env.get("num_steps", mask)) == 2
            env.set("length", [8, 9], env_ids=mask)
            assert env.get("length") == [8, None, 9]
            env.send(env.rand_action(env.current(mask)), mask)
            assert sorted(env.recv(env_ids=mask)["env_ids"].tolist()) == [0, 2]
        assert not len(env.current(torch.zeros(3, dtype=torch.bool)))


NO_IDS = r"expected env ids as integers, or as a bool mask of shape \(3,\)"


@both
def test_values_that_are_no_ids_or_mask_are_refused(make):
    no_ids = [[0.7], np.array([1.9]), torch.tensor([0.0]), [True, False], ["0"]]
    wrong = [*((ids, NO_IDS) for ids in (*no_ids, torch.ones(3, 1, dtype=torch.bool)))]
    wrong += [(ids, r"different env ids in 0\.\.2") for ids in ([3], [-1], [0, 0])]
    with begun(make(3, CountingEnv, seed=0)) as env:
        for env_ids, message in wrong:
            for ask in (
                functools.partial(env.current, env_ids),
                functools.partial(env.call, "pid", env_ids=env_ids),
                functools.partial(env.set, "length", 1, env_ids=env_ids),
                functools.partial(env.get, "num_steps", env_ids=env_ids),
                functools.partial(env.send, act(env)[: len(env_ids)], env_ids),
            ):
                with pytest.raises(ValueError, match=message):
                    ask()
        with pytest.raises(
            ValueError,
            match="send failed: expected a batch with a row for each of 2 envs",
        ):
            env.send(act(env)[:1], [0, 1])
        assert env.statistics().env_steps == 0


@pytest.mark.slow
class TestAtMost:
    """`recv(min_envs, timeout_s, max_envs=...)` returns all ready envs."""

    def test_all_that_are_ready_come_without_a_deadline(self):
        with begun(ParallelEnv(4, CountingEnv, num_workers=2, seed=0)) as env:
            env.send(env.rand_action())
            wait_for(lambda: env.engine.pool.words.has_answered().all())
            assert len(env.recv(1, max_envs=3)) == 3
            assert len(env.recv(1, max_envs=3)) == 1

    def test_at_the_deadline_those_come_that_are_ready(self, tmp_path):
        gate = Gate(tmp_path)
        make = [CountingEnv, CountingEnv, functools.partial(HaltingEnv, gate, 1)]
        with begun(ParallelEnv(3, make, num_workers=3, seed=0)) as env:
            env.send(env.rand_action())
            wait_for(
                lambda: (
                    env.engine.pool.words.has_answered().tolist() == [True, True, False]
                )
            )
            assert sorted(env.recv(1, 0.01, max_envs=3)["env_ids"].tolist()) == [0, 1]
            with pytest.raises(
                TimeoutError, match=r"expected 1 envs within 0\.01 s, got 0"
            ):
                env.recv(1, 0.01, max_envs=1)
            gate.open()
            assert env.recv(1, 60.0, max_envs=3)["env_ids"].tolist() == [2]


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_recv_returns_what_the_policy_has_added_to_these_steps(make, mode):
    drawn = torch.zeros(4, 2)

    def acted(root):
        ids = root["env_ids"]
        drawn[ids] = torch.rand(len(ids), 2)
        # Two views: what is kept is a copy.
        return (
            ones(root).set("log_prob", drawn[:, 0][ids]).set("value", drawn[:, 1:][ids])
        )

    with make(4, CountingEnv) as env, mode():
        env.reset()
        env.send(acted(env.current(range(4))))
        for _ in range(20):
            td = env.recv(min_envs=2)
            expected = drawn[td["env_ids"]]
            assert td["log_prob"].equal(expected[:, 0])
            assert td["value"].equal(expected[:, 1:])
            env.send(acted(env.current(td["env_ids"])))


@both
def test_added_rows_belong_to_their_steps(make):
    with make(3, CountingEnv) as env:
        root = ones(env.reset()).set("value", torch.zeros(3, requires_grad=True))
        env.send(root[:0], [])
        root["bits"] = torch.tensor([1, 2, 3], dtype=torch.uint16)
        root["sparse"] = torch.eye(3).to_sparse()
        env.send(root)
        with pytest.raises(Busy):
            env.send(root.set("value", torch.ones(3)))
        with pytest.raises(TypeError, match="expected a batch"):
            env.send({})
        assert not (td := env.recv())["value"].requires_grad
        assert not td["value"].any()
        assert td["bits"].tolist() == [1, 2, 3]
        assert "sparse" not in td
        env.send(ones(env.current([2])).set("value", torch.ones(1, 2)))
        env.send(ones(env.current([0, 1])).set("value", torch.zeros(2)))
        assert "value" not in env.recv(env_ids=[0, 2])
        env.send(ones(env.current([0, 2])).set("value", torch.ones(2, 2)), iter([0, 2]))
        assert "value" not in env.recv(env_ids=[0], with_root=False)
        assert env.recv(env_ids=[2])["value"].tolist() == [[1, 1]]
        assert env.recv(env_ids=[1])["value"].tolist() == [0]
        env.send(ones(env.current([2])))
        assert "value" not in env.recv(env_ids=[2])


def test_what_is_added_is_not_the_envs_and_has_rows():
    added = AddedRows({("a", "b"), ("d",), ("f", "g")}, 2)
    x = torch.zeros(2)
    assert not added.find(TensorDict({"a": {"b": x}, "d": x, "f": {"g": x}}, [2]))
    td = TensorDict({"a": {"b": x, "c": x}, "d": {"e": x}, "f": x}, [2])
    td["h"] = lazy_stack([TensorDict({"i": torch.zeros(n)}) for n in (1, 2)])
    assert [*added.find(td)] == [("a", "c")]
