"""The policy's own state begins anew with the episode of each row, also where an env is a batch of rows."""

import functools
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from envherd.executor import AsyncCollector, Collector, ParallelEnv, SerialEnv
from envherd.executor.rollouts.rollout import StepwiseRun
from envherd.workers.errors import EnvError
from tests.envs.torch_simulators import NUM_ROWS, Counter

pytestmark = pytest.mark.preloads()

FRAMES = 40


def remember(td: Any) -> Any:
    """Count the steps of each row's episode."""
    td["next", "memory"] = td["memory"] + 1
    return td.set("action", torch.zeros(*td.batch_size, 2))


def collected(collector: Any, env: Any, primer: TensorDict) -> TensorDict:
    with collector(
        env, remember, frames_per_batch=FRAMES, primer=primer, close_env=False
    ) as made:
        return torch.cat([made.collect().clone() for _ in range(2)], 1)


def rolled(
    env: Any, primer: TensorDict, run: Any = None, *, breaks: bool = False
) -> TensorDict:
    """Make two rollouts; the second one begins with rows that have ended, and others in the middle."""
    env._rollouts._run_type = run or env._rollouts._run_type
    first = env.rollout(
        11, remember, primer=primer, break_when_any_done=breaks, auto_reset=True
    )
    state = env.current()
    state["memory"] = first["next", "memory"][:, -1]
    second = env.rollout(
        11,
        remember,
        primer=primer,
        break_when_any_done=breaks,
        auto_reset=False,
        tensordict=state,
    )
    return torch.cat([first, second], 1)


@pytest.mark.parametrize(
    ("make", "collect"),
    [
        (functools.partial(SerialEnv, 1), rolled),
        (functools.partial(SerialEnv, 1), functools.partial(rolled, breaks=True)),
        (functools.partial(SerialEnv, 1), functools.partial(collected, Collector)),
        (functools.partial(ParallelEnv, 2), rolled),
        (functools.partial(ParallelEnv, 2), functools.partial(rolled, breaks=True)),
        (functools.partial(ParallelEnv, 2), functools.partial(rolled, run=StepwiseRun)),
        (functools.partial(ParallelEnv, 2), functools.partial(collected, Collector)),
        (
            functools.partial(ParallelEnv, 2),
            functools.partial(collected, AsyncCollector),
        ),
    ],
    ids=[
        "simulator",
        "simulator-breaks",
        "simulator-collector",
        "rollout",
        "rollout-breaks",
        "stepwise",
        "collector",
        "async",
    ],
)
def test_a_row_that_ends_leaves_the_state_of_the_others(make, collect):
    with make(Counter, seed=0) as env:
        shape = (env.num_envs, NUM_ROWS)
        primer = TensorDict({"memory": torch.zeros(*shape, 1)}, shape)
        data = collect(env, primer=primer)
    assert data.batch_size[2:] == (NUM_ROWS,)
    done = data["next", "done"]
    assert (done.any(2) & ~done.all(2)).any()
    assert torch.equal(data["memory"][..., 0], data["observation"][..., 1])


class RaisesOnce(Counter):
    """Raises in its first reset of some rows."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if options is not None and self.num_steps == 3:
            raise RuntimeError("boom")
        return super().reset(seed=seed, options=options)


def rolled_on(env: Any, primer: TensorDict) -> TensorDict:
    with pytest.raises(EnvError):
        env.rollout(11, remember, primer=primer, break_when_any_done=False)
    assert env.current()["done"].all()
    return env.rollout(
        11,
        remember,
        primer=primer,
        break_when_any_done=False,
        auto_reset=False,
        tensordict=env.policy_state,
    )


def collected_on(env: Any, primer: TensorDict) -> TensorDict:
    made = AsyncCollector(
        env, remember, frames_per_batch=FRAMES, primer=primer, close_env=False
    )
    failed: set[int] = set()
    # One error names both envs if both have failed when it is raised.
    while failed != set(range(env.num_envs)):
        with pytest.raises(EnvError) as error:
            made.collect()
        failed.update(error.value.env_ids)
    return made.collect()


@pytest.mark.parametrize("run", [rolled_on, collected_on])
@pytest.mark.parametrize(
    "make", [functools.partial(SerialEnv, 1), functools.partial(ParallelEnv, 2)]
)
def test_an_env_whose_partial_reset_raises_begins_anew_in_all_rows(make, run):
    with make(RaisesOnce, seed=0) as env:
        primer = TensorDict({"memory": torch.zeros(*env.batch_size, 1)}, env.batch_size)
        data = run(env, primer)
    assert torch.equal(data["memory"][..., 0], data["observation"][..., 1])
