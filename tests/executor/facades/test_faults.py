"""Each facade x each fault: what is raised, and that it works afterwards. `tests/conftest.py` looks for leftovers.

RLlib needs another Gymnasium than the other facades: its environment (see `test_rllib.py`) runs its rows.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium.error import ClosedEnvironmentError

from envherd.executor import (
    ActionError,
    Closed,
    EnvError,
    ExecutorOptions,
    FactoryError,
    ResetNeeded,
    SpecError,
    WorkerLost,
    WorkerTimeout,
)
from tests.envs.faulty_envs import (
    DIES,
    GOES_ON,
    HANGS,
    RAISES,
    WAITS,
    Faulty,
    as_pettingzoo,
    as_torchrl,
    raising,
)
from tests.extras import needs
from tests.faults.test_interrupts import Interrupt, at_each, tracing
from tests.gates import Gate, interrupt
from tests.scale import scaled

PRELOADED: tuple[str, ...] = ()
if importlib.util.find_spec("torchrl") is not None:
    from tests.envs.torchrl_own import PRELOADED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.preloads(*PRELOADED),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Driver:
    """Drives a facade whose envs are reset when they end.

    Attributes:
        build: returns the facade's env.
        of_factories: what it raises for a factory that raises `LookupError`.
        of_steps: what it raises for a step that raises `LookupError`, and for a reset that raises `ArithmeticError`.
        of_unlike_envs: what it raises for envs with different spaces.
        of_a_seed: what it raises for a seed that is a text.
        after_fault: what it raises for a step of an env that has raised; None if the env is stepped.
        after_close: what it raises once it is closed; None if it starts again.
        resets_in_step: whether an env that ends is reset in the same step, rather than in the next one.
    """

    build: ClassVar[Callable[..., Any]] = Faulty
    of_factories: ClassVar[Any] = LookupError
    of_steps: ClassVar[tuple[Any, Any]] = (LookupError, ArithmeticError)
    of_unlike_envs: ClassVar[tuple[Any, str]] = (
        RuntimeError,
        "different|not equivalent",
    )
    of_a_seed: ClassVar[Any] = (ValueError, TypeError)
    after_fault: ClassVar[Any] = ResetNeeded
    after_close: ClassVar[Any] = ClosedEnvironmentError
    resets_in_step: ClassVar[bool] = True

    def __init__(self, makes: list[Any], **options: Any) -> None:
        self.env: Any = self.open(
            makes, ExecutorOptions(close_timeout_s=1.0, **options)
        )

    def open(self, makes: list[Any], options: ExecutorOptions) -> Any:
        from envherd.gymnasium import AsyncVectorEnv

        return AsyncVectorEnv(
            makes, num_workers=len(makes), autoreset_mode="SameStep", options=options
        )

    def reset(self) -> list[float]:
        """Reset; return what the envs observe."""
        return self.env.reset()[0][:, 0].tolist()

    def step(self, actions: Any) -> tuple[list[float], list[bool]]:
        """Step; return what the envs observe after resets of those that have ended, and which have."""
        observations, _, ends, cuts, _ = self.env.step(np.array(actions))
        return observations[:, 0].tolist(), (ends | cuts).tolist()

    def seed(self, seed: int) -> None:
        self.env.reset(seed=seed)

    def close(self) -> None:
        self.env.close()


class CleanRL(Driver):
    def open(self, makes: list[Any], options: ExecutorOptions) -> Any:
        from envherd.cleanrl import Gym

        return Gym(num_workers=len(makes), options=options).vector.AsyncVectorEnv(makes)


class PettingZoo(Driver):
    build = as_pettingzoo

    def open(self, makes: list[Any], options: ExecutorOptions) -> Any:
        from envherd.pettingzoo import ParallelVectorEnv

        return ParallelVectorEnv(
            makes, num_workers=len(makes), autoreset_mode="SameStep", options=options
        )

    def reset(self) -> list[float]:
        return self.env.reset()[0]["agent"][:, 0].tolist()

    def step(self, actions: Any) -> tuple[list[float], list[bool]]:
        observations, _, ends, cuts, _ = self.env.step({"agent": np.array(actions)})
        return observations["agent"][:, 0].tolist(), (
            ends["agent"] | cuts["agent"]
        ).tolist()


class RLlib(Driver):
    build = as_pettingzoo
    resets_in_step = False

    def open(self, makes: list[Any], options: ExecutorOptions) -> Any:
        os.environ["RLLIB_TEST_NO_TF_IMPORT"] = "1"  # docs/rllib.md says why
        from envherd.rllib import MultiAgentVectorEnv

        return MultiAgentVectorEnv(makes, num_workers=len(makes), options=options)

    def reset(self) -> list[float]:
        return [seen["agent"].item() for seen in self.env.reset()[0]]

    def step(self, actions: Any) -> tuple[list[float], list[bool]]:
        observations, _, ends, cuts, _ = self.env.step(
            [{"agent": action} for action in actions]
        )
        over = [
            end["__all__"] or cut["__all__"]
            for end, cut in zip(ends, cuts, strict=True)
        ]
        return [seen["agent"].item() for seen in observations], over


class Sb3(Driver):
    of_factories = FactoryError
    of_unlike_envs = (
        SpecError,
        "expected envs with equal spaces, got different ones for env 0 and env 1: observation",
    )
    after_close = Closed

    def open(self, makes: list[Any], options: ExecutorOptions) -> Any:
        from envherd.sb3 import SubprocVecEnv

        return SubprocVecEnv(makes, num_workers=len(makes), options=options)

    def reset(self) -> list[float]:
        return self.env.reset()[:, 0].tolist()

    def step(self, actions: Any) -> tuple[list[float], list[bool]]:
        observations, _, dones, _ = self.env.step(np.array(actions))
        return observations[:, 0].tolist(), dones.tolist()

    def seed(self, seed: int) -> None:
        self.env.seed(seed)
        self.env.reset()


class TorchRL(Driver):
    build = as_torchrl
    of_steps = (EnvError, EnvError)
    of_unlike_envs = (RuntimeError, "shape|spec")
    of_a_seed = EnvError
    after_fault = after_close = None

    def open(self, makes: list[Any], options: ExecutorOptions) -> Any:
        from envherd.torchrl import ParallelEnv

        return ParallelEnv(len(makes), makes, num_processes=len(makes), options=options)

    def reset(self) -> list[float]:
        self.root = self.env.reset()
        return self.root["observation"][:, 0].tolist()

    def step(self, actions: Any) -> tuple[list[float], list[bool]]:
        acted = self.root.clone().set("action", torch.tensor(actions))
        data, self.root = self.env.step_and_maybe_reset(acted)
        return self.root["observation"][:, 0].tolist(), data["next", "done"][
            :, 0
        ].tolist()

    def seed(self, seed: int) -> None:
        self.env.set_seed(seed)

    def close(self) -> None:
        self.env.close(raise_if_closed=False)


DRIVERS = [
    pytest.param(Driver, id="gymnasium"),
    pytest.param(CleanRL, id="cleanrl"),
    pytest.param(PettingZoo, id="pettingzoo", marks=needs("pettingzoo")),
    pytest.param(RLlib, id="rllib", marks=needs("rllib", "pettingzoo")),
    pytest.param(Sb3, id="sb3", marks=needs("sb3")),
    pytest.param(TorchRL, id="torchrl", marks=needs("torchrl")),
]
each = pytest.mark.parametrize("kind", DRIVERS)


@pytest.fixture
def start(kind: Any, tmp_path: Any) -> Iterator[Callable[..., Driver]]:
    """Return a function that opens a facade over two envs, which are in two workers."""
    made: list[Driver] = []

    def start_one(**options: Any) -> Driver:
        made.append(kind([functools.partial(kind.build, str(tmp_path))] * 2, **options))
        return made[-1]

    yield start_one
    while made:
        made.pop().close()


#: What Ctrl-C interrupts: a step, and a reset.
CALLS: dict[str, Callable[[Any], Any]] = {
    "step": lambda it: it.step([GOES_ON] * 2),
    "reset": lambda it: it.reset(),
}


def assert_works(driver: Driver) -> None:
    """Require that all envs can be reset, and make steps."""
    assert driver.reset() == [0, 0]
    for count in (1, 2):
        assert driver.step([GOES_ON, GOES_ON]) == ([count, count], [False, False])


@each
def test_failures_of_a_start_are_raised(kind: Any, tmp_path: Any) -> None:
    def start(*makes: Any) -> None:
        with contextlib.closing(kind([*makes])) as driver:
            driver.reset()

    with pytest.raises(FactoryError, match="no such level") as caught:
        start(raising, raising)
    assert isinstance(caught.value, kind.of_factories)
    with pytest.raises((FactoryError, TypeError), match=r"expected a callable|lambda"):
        start(*[kind.build(str(tmp_path))] * 2)
    error, text = kind.of_unlike_envs
    with pytest.raises(error, match=text):
        start(*(functools.partial(kind.build, str(tmp_path), size) for size in (1, 2)))


@each
def test_faults_that_no_worker_is_lost_for(
    kind: Any, start: Any, tmp_path: Any
) -> None:
    driver, (of_step, of_reset) = start(), kind.of_steps
    assert_works(driver)
    with pytest.raises(of_step, match="no step") as caught:
        driver.step([GOES_ON, RAISES])
    assert isinstance(caught.value, EnvError)
    assert caught.value.env_ids == (1,)
    if kind.after_fault is not None:
        with pytest.raises(kind.after_fault):
            driver.step([GOES_ON, GOES_ON])
    assert_works(driver)
    (tmp_path / "broken").touch()
    with pytest.raises(of_reset, match="no reset") as refused:
        driver.reset()
    assert isinstance(refused.value, EnvError)
    (tmp_path / "broken").unlink()
    assert_works(driver)
    with pytest.raises((ActionError, ValueError, RuntimeError)):
        driver.step([GOES_ON])
    assert driver.step([GOES_ON, GOES_ON]) == ([3, 3], [False, False])
    with pytest.raises(kind.of_a_seed):
        driver.seed("seed")
    assert_works(driver)
    interrupt(Gate(tmp_path), lambda: driver.step([GOES_ON, WAITS]))
    assert_works(driver)
    driver.close()
    driver.close()
    if kind.after_close is not None:
        with pytest.raises(kind.after_close, match=r"clos"):
            driver.step([GOES_ON, GOES_ON])
    else:
        assert_works(driver)


#: A step has a limit only where an env hangs: on a busy machine the other one may be late.
LIMITS: dict[int, dict[str, Any]] = {DIES: {}, HANGS: {"step_timeout_s": 1.0}}


@pytest.mark.sampled(2)
@pytest.mark.broken_pool
@pytest.mark.parametrize(
    ("action", "error"),
    [(DIES, WorkerLost), (HANGS, WorkerTimeout)],
    ids=["dies", "hangs"],
)
@each
def test_a_worker_that_is_lost_is_named(
    kind: Any, start: Any, action: int, error: Any
) -> None:
    with contextlib.closing(start(**LIMITS[action])) as driver:
        driver.reset()
        with pytest.raises(
            error,
            match=r"SIGKILL.*\(env 1,"
            if action == DIES
            else r"no answer within 1 s.*env 1",
        ):
            driver.step([GOES_ON, action])
        with pytest.raises(error):
            driver.reset()
    if kind.after_close is None:
        assert_works(driver)


#: What lets all continue after a fault.
REMEDIES: dict[int, dict[str, Any]] = {
    DIES: {"on_worker_loss": "restart"},
    RAISES: {"on_env_error": "interrupt"},
}


@pytest.mark.broken_pool
@pytest.mark.parametrize("action", REMEDIES, ids=["dies", "raises"])
@each
def test_an_env_that_fails_can_be_interrupted(
    kind: Any, start: Any, action: int
) -> None:
    """Its episode has ended without another reward; the next one has begun."""
    driver = start(**REMEDIES[action])
    driver.reset()
    driver.step([GOES_ON, GOES_ON])
    last, first = (0, 1) if kind.resets_in_step else (1, 0)
    assert driver.step([GOES_ON, action]) == ([2, last], [False, True])
    assert driver.step([GOES_ON, GOES_ON]) == ([3, first], [False, False])
    assert_works(driver)


@each
def test_a_reset_that_raises_is_made_again_with_a_new_instance(
    kind: Any, start: Any, tmp_path: Any
) -> None:
    driver = start(**REMEDIES[RAISES])
    assert_works(driver)
    (tmp_path / "wrecked").touch()
    assert_works(driver)
    driver.step([GOES_ON, RAISES])
    (tmp_path / "wrecked").touch()
    if not kind.resets_in_step:
        driver.step([GOES_ON, GOES_ON])
    assert_works(driver)
    (tmp_path / "broken").touch()
    with pytest.raises(kind.of_steps[1], match="no reset"):  # as often as it is tried
        driver.reset()
    (tmp_path / "broken").unlink()
    assert_works(driver)


@pytest.mark.parametrize("name", CALLS)
@each
def test_ctrl_c_at_every_line(kind: Any, start: Any, name: str) -> None:
    """The interrupted step or reset is dropped, wherever that was: all envs can be reset, and the data are theirs."""
    driver = start()
    driver.reset()
    for one in at_each(Interrupt, scaled(3 if name == "step" else 11, full=1), least=3):
        with tracing(one):
            CALLS[name](driver)
        assert_works(driver)
