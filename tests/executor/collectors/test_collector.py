"""`Collector`: batches without gaps, unchanged policies, and unchanged policy state."""

import ctypes
import functools
import re
import socket
import threading

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from envherd.executor import ActionError, Collector, EnvError, ParallelEnv, SerialEnv
from envherd.executor.guests.collectors.policy import (
    Placed,
    swapped_parameters,
    uncopied,
)
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.executor.calls import ones

NUM_ENVS = 3


@pytest.fixture(
    params=[SerialEnv, functools.partial(ParallelEnv, num_workers=2)],
    ids=["serial", "parallel"],
)
def env(request):
    with request.param(NUM_ENVS, CountingEnv, seed=0) as env:
        yield env


class Holding(nn.Module):
    """A policy with an attribute that can be neither copied nor pickled."""

    def __init__(self, held):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.inner = nn.Module()
        self.inner.held = held
        self.num_calls = 0

    def forward(self, td):
        self.num_calls += 1
        return td.set(
            "action",
            self.linear(td["observation"].to(self.linear.weight.dtype)).argmax(-1),
        )

    def __reduce__(self):
        raise TypeError("pickled after all")


HELD = {
    "socket": socket.socket,
    "lock": threading.Lock,
    "handle": lambda: ctypes.pointer(ctypes.c_int(3)),
    "generator": lambda: (i for i in range(3)),
}


@pytest.fixture(params=HELD)
def holding(request):
    held = HELD[request.param]()
    yield Holding(held)
    if isinstance(held, socket.socket):
        held.close()


# ---- batches ---------------------------------------------------------------------------------


def test_batches_are_as_one_long_rollout(env):
    collector = Collector(
        env, ones, frames_per_batch=12, total_frames=60, close_env=False
    )
    batches = [batch.clone() for batch in collector]
    assert [tuple(batch.shape) for batch in batches] == [(NUM_ENVS, 4)] * 5
    assert collector.num_frames == 60
    env.set_seed(0)
    whole = env.rollout(20, ones, break_when_any_done=False)
    joined = torch.cat(batches, 1)
    assert whole["next", "done"].any()
    for key in whole.keys(include_nested=True, leaves_only=True):
        assert torch.equal(joined[key], whole[key]), key


def test_counts_are_rounded_up_and_it_says_so_each_time(env, caplog):
    for _ in range(2):
        collector = Collector(
            env,
            frames_per_batch=10,
            total_frames=20,
            init_random_frames=5,
            close_env=False,
        )
    message = (
        "frames_per_batch=10 is not a multiple of 3 envs and total_frames=20 is not a multiple of 12 frames per batch "
        "and init_random_frames=5 is not a multiple of 12 frames per batch: rounded up."
    )
    assert caplog.messages == [message] * 2
    assert sum(batch.numel() for batch in collector) == 24


def test_a_loop_that_was_left_goes_on(env):
    collector = Collector(env, ones, frames_per_batch=3, close_env=False)
    first = next(iter(collector))["observation"][:, 0, 1].clone()
    second = next(iter(collector))["observation"][:, 0, 1]
    assert torch.equal(second, first + 1)


def test_random_frames_come_first(env):
    calls = []
    collector = Collector(
        env,
        lambda td: calls.append(1) or ones(td),
        frames_per_batch=6,
        init_random_frames=12,
        close_env=False,
    )
    collector.collect()
    collector.collect()
    assert not calls
    collector.collect()
    assert len(calls) == 2


def test_every_batch_begins_with_a_reset_if_asked(env):
    collector = Collector(
        env, ones, frames_per_batch=3, reset_at_each_iter=True, close_env=False
    )
    for _ in range(3):
        assert (collector.collect()["observation"][:, 0, 1] == 0).all()


def test_collector_closes_its_executor():
    env = SerialEnv(2, CountingEnv)
    with Collector(env, frames_per_batch=2) as collector:
        collector.collect()
    assert env.is_closed
    collector.shutdown()


def test_results_that_are_no_tensordict_are_refused(env):
    collector = Collector(
        env, lambda td: td["observation"], frames_per_batch=3, close_env=False
    )
    with pytest.raises(
        TypeError, match=r"expected the policy to return a TensorDict.*got Tensor"
    ):
        collector.collect()
    with pytest.raises(ValueError, match="got both"):
        Collector(env, ones, policy_factory=lambda: ones, frames_per_batch=3)


# ---- policies --------------------------------------------------------------------------------


def test_a_policy_is_called_itself(env, holding, caplog):
    collector = Collector(
        env, holding, frames_per_batch=6, policy_device="cpu", close_env=False
    )
    assert collector.policy is holding
    collector.collect()
    assert holding.num_calls == 2
    assert caplog.messages == [], "it need not be copied"


def test_policy_that_cannot_be_copied_is_used_itself_and_named(holding, caplog):
    placed = Placed(holding, "meta")
    (message,) = caplog.messages
    assert re.search(
        r"the attribute inner\.held \(.*cannot be copied.*stays on cpu", message
    )
    assert placed.policy is holding
    assert placed.device == torch.device("cpu")


def compiled_in_place():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: type("Own", (nn.Linear,), {"copyable": False})(3, 2),
            "copyable = False",
        ),
        (lambda: nn.LazyLinear(2), "weight is not initialised yet"),
        (
            compiled_in_place,
            r"0 was compiled in place, .* use torch.compile\(module\)",
        ),
    ],
)
def test_a_policy_that_must_not_be_copied_is_used_itself(make, reason, caplog):
    policy = make()
    assert Placed(policy, "meta").policy is policy
    assert re.search(reason, caplog.text)


def test_a_compiled_policy_is_copied():
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    placed = Placed(compiled, "meta")
    assert placed.is_copy
    assert type(placed.policy) is type(compiled)


def test_the_data_goes_to_the_policy():
    class OnMeta(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, device="meta"))

        def forward(self, td):
            assert td.device == torch.device("meta")
            return td.set("extra", td["observation"] * 2)

    root = TensorDict({"observation": torch.zeros(2, 3)}, [2], device="cpu")
    seen = []
    placed = Placed(OnMeta())
    placed.policy.register_forward_hook(
        lambda _module, args, _out: seen.append(args[0].device)
    )
    assert placed.device == torch.device("meta")
    # Values cannot come back, so they were sent there.
    with pytest.raises(NotImplementedError, match="meta"):
        placed(root)
    assert seen == [torch.device("meta")]


@pytest.mark.parametrize(
    ("count", "mode"),
    [
        (lambda hidden: hidden + 1, torch.no_grad),
        (lambda hidden: hidden.add_(1), torch.no_grad),
        (lambda hidden: hidden.add_(1), torch.inference_mode),
    ],
    ids=["overwritten", "in place", "in place, in inference mode"],
)
def test_leaves_that_a_policy_changes_are_in_the_batch(monkeypatch, count, mode):
    # As for another device; another name of the device is enough to move.
    monkeypatch.setattr(TensorDict, "to", lambda td, *_, **__: td.clone())

    def policy(td):
        td["hidden"] = count(td["hidden"])
        return td.set("action", torch.ones(2))

    with mode():
        root = TensorDict(
            {"observation": torch.zeros(2, 3), "hidden": torch.zeros(2)},
            [2],
            device="cpu",
        )
        observation = root["observation"]
        acted = Placed(policy, "cpu:0")(root)
        assert acted["hidden"].tolist() == [1, 1]
        assert acted["action"].tolist() == [1, 1]
        assert mode is torch.inference_mode or acted["observation"] is observation


def test_a_copy_follows_the_original(monkeypatch):
    policy = Holding(None)
    policy.__class__ = type(
        "Copyable", (Holding,), {"__reduce__": nn.Module.__reduce__}
    )
    placed = Placed(policy, "cpu")
    assert placed.policy is policy
    monkeypatch.setattr(
        "envherd.executor.guests.collectors.policy._device_of",
        lambda _policy: torch.device("meta"),
    )
    placed = Placed(policy, "cpu")
    assert placed.is_copy
    assert placed.policy is not policy
    with torch.no_grad():
        policy.linear.weight.add_(1)
    assert not torch.equal(placed.policy.linear.weight, policy.linear.weight)
    placed.follow()
    assert torch.equal(placed.policy.linear.weight, policy.linear.weight)


def test_a_factory_builds_the_policy_when_it_is_needed(env):
    built = []

    def build():
        built.append(Holding(threading.Lock()))
        return built[0]

    collector = Collector(
        env, policy_factory=build, frames_per_batch=3, close_env=False
    )
    assert not built
    collector.collect()
    collector.collect()
    assert len(built) == 1
    assert collector.policy is built[0]


# ---- state -----------------------------------------------------------------------------------


def recurrent(td):
    """Count the steps of the episode, or of all episodes without a primer."""
    hidden = td.get("hidden", None)
    hidden = torch.zeros(td.shape[0], 2) if hidden is None else hidden
    td["next", "hidden"] = hidden + 1
    return ones(td)


def test_state_passes_through_untouched(env):
    collector = Collector(env, recurrent, frames_per_batch=15, close_env=False)
    states = torch.cat(
        [collector.collect()["next", "hidden"].clone() for _ in range(3)], 1
    )
    assert torch.equal(
        states, torch.arange(1.0, 16.0).reshape(1, 15, 1).expand(NUM_ENVS, 15, 2)
    )


def test_state_begins_anew_with_every_episode_if_primed(env):
    primer = TensorDict({"hidden": torch.full((NUM_ENVS, 2), 10.0)}, [NUM_ENVS])
    collector = Collector(
        env, recurrent, frames_per_batch=15, primer=primer, close_env=False
    )
    data = torch.cat([collector.collect().clone() for _ in range(3)], 1)
    assert data["next", "done"][:, :-1].any()
    expected = data["observation"][..., 1:2].float() + 10
    assert torch.equal(data["hidden"], expected.expand(NUM_ENVS, 15, 2))
    assert torch.equal(data["next", "hidden"], data["hidden"] + 1)
    assert (primer["hidden"] == 10).all()


@pytest.mark.parametrize(
    "make", [SerialEnv, functools.partial(ParallelEnv, num_workers=2)]
)
@pytest.mark.parametrize("culprit", ["env", "policy", "action"])
def test_recurrent_state_after_an_error_belongs_to_the_envs_episode(
    make, culprit, tmp_path
):
    """The state counts the steps of the episode, as the envs do."""
    primer = TensorDict({"hidden": torch.zeros(NUM_ENVS, 2)}, [NUM_ENVS])
    calls = []

    def policy(td):
        calls.append(len(calls))
        if culprit == "policy" and len(calls) == 8:
            raise KeyError("mine")
        td = recurrent(td)
        return (
            td.set("action", td["action"] + 10_000)
            if culprit == "action" and len(calls) == 8
            else td
        )

    faulty = functools.partial(
        FaultyEnv,
        "raise" if culprit == "env" else None,
        step=8,
        flag=str(tmp_path / "broken"),
    )
    with make(
        NUM_ENVS, [faulty, CountingEnv, functools.partial(CountingEnv, 4)], seed=0
    ) as env:
        collector = Collector(
            env, policy, frames_per_batch=5 * NUM_ENVS, primer=primer, close_env=False
        )
        batches = [collector.collect()]
        with pytest.raises((EnvError, KeyError, ActionError)):
            collector.collect()
        batches += [collector.collect() for _ in range(2)]
        resumed = batches[1]["observation"][:, 0, 1].tolist()
    for data in batches:
        assert torch.equal(
            data["hidden"], data["observation"][..., 1:2].float().expand(NUM_ENVS, 5, 2)
        )
    assert resumed[0] == (0 if culprit == "env" else 7)


def test_steps_pass_recurrent_state_on(env):
    td = env.reset()
    for step in range(1, 8):
        td, root = env.step_and_maybe_reset(recurrent(td))
        assert (td["next", "hidden"] == step).all()
        assert (root["hidden"] == step).all()
        td = root
    td = env.step(recurrent(td))
    assert (td["next", "hidden"] == 8).all()
    assert set(td["next"].keys()) == {
        "observation",
        "reward",
        "done",
        "terminated",
        "truncated",
        "hidden",
    }


# ---- losses ----------------------------------------------------------------------------------


def test_other_parameters_for_a_while(holding):
    own = holding.linear.weight
    other = TensorDict.from_module(holding).apply(
        lambda p: torch.zeros_like(p, requires_grad=True)
    )
    td = TensorDict({"observation": torch.ones(2, 3)}, [2])
    with swapped_parameters(holding, other) as module:
        assert module is holding
        loss = module.linear(td["observation"]).sum()
    loss.backward()
    assert holding.linear.weight is own
    assert own.grad is None
    assert (other["linear", "weight"].grad == 2).all()
    with pytest.raises(RuntimeError), swapped_parameters(holding, other):
        raise RuntimeError
    assert holding.linear.weight is own
    with (
        pytest.raises(KeyError, match="got none for"),
        swapped_parameters(holding, other.exclude(("linear", "weight"))),
    ):
        pass


def test_copies_give_the_module_itself_for_a_while(holding):
    import copy

    with uncopied(holding):
        assert copy.deepcopy(nn.Sequential(holding))[0] is holding
    with pytest.raises((TypeError, ValueError)):
        copy.deepcopy(holding)
