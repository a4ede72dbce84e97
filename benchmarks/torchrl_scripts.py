"""Time TorchRL scripts with one import changed: TorchRL's `ParallelEnv`, its facade, and the native executor.

    python -m benchmarks.torchrl_scripts [CASE ...] [--rounds 5]

All three are alive in one process and take turns; steps are synchronous, with resets. Columns: env-steps/s by the clock
(medians over the rounds), processor microseconds of all processes per env step, and the seconds from the constructor to
the first reset (of the facade: its first start in this process, which has imported TorchRL, and its next).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.accounting import usage_of
from envherd.workers.processes import descendants


class Case(NamedTuple):
    """One script.

    Attributes:
        make: builds its TorchRL env.
        native: factory of the same env for the executor, without TorchRL.
        num_envs: of the batch; two workers run them, TorchRL's class one per env.
        num_steps: steps of the batch in a turn (TorchRL's class makes a sixth of them).
    """

    make: Callable[[], Any]
    native: Callable[[], Any]
    num_envs: int = 8
    num_steps: int = 600


def cartpole() -> Any:
    """Return a `GymEnv`."""
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


def transformed() -> Any:
    """Return a `TransformedEnv` with three transforms."""
    from torchrl.envs import Compose, DoubleToFloat, GymEnv, RewardSum, StepCounter, TransformedEnv

    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(StepCounter(), RewardSum(), DoubleToFloat()))


def cheetah() -> Any:
    """Return a `DMControlEnv`."""
    from torchrl.envs import DMControlEnv

    return DMControlEnv("cheetah", "run")


def multiwalker() -> Any:
    """Return a `PettingZooWrapper`."""
    from torchrl.envs import PettingZooWrapper

    return PettingZooWrapper(_native_multiwalker())


def meltingpot(substrate: str) -> Any:
    """Return a `MeltingpotEnv`."""
    from torchrl.envs.libs.meltingpot import MeltingpotEnv

    return MeltingpotEnv(substrate)


def _native_gym(env_id: str) -> Any:
    import gymnasium

    return gymnasium.make(env_id)


def _native_cheetah() -> Any:
    from dm_control import suite

    return suite.load("cheetah", "run")


def _native_multiwalker() -> Any:
    from pettingzoo.sisl import multiwalker_v9

    return multiwalker_v9.parallel_env()


def _native_meltingpot(substrate: str) -> Any:
    from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory

    return MeltingPotFactory(substrate)()


CASES = {
    "cartpole": Case(cartpole, functools.partial(_native_gym, "CartPole-v1")),
    "pendulum, 3 transforms": Case(transformed, functools.partial(_native_gym, "Pendulum-v1")),
    "cheetah run": Case(cheetah, _native_cheetah, num_steps=300),
    "multiwalker": Case(multiwalker, _native_multiwalker, num_steps=120),
    **{
        name: Case(functools.partial(meltingpot, name), functools.partial(_native_meltingpot, name), 4, 60)
        for name in ("commons_harvest__open", "clean_up", "coins")
    },
}


def _action_key(env: Any) -> Any:
    return env.action_spec[0].key if isinstance(env.action_spec, tuple) else env.action_key


class _Turns:
    """Steps one batched env with one batch of random actions."""

    def __init__(self, env: Any, num_envs: int) -> None:
        self._env, self._num_envs = env, num_envs
        self._key = _action_key(env)
        self._root = env.reset()
        self._action = env.rand_action(self._root.clone()).get(self._key).clone()
        self.run(10)

    def run(self, num_steps: int) -> tuple[float, float]:
        """Return env-steps/s, and processor microseconds per env step."""
        pids = [os.getpid(), *descendants(os.getpid())]
        before, began = usage_of(pids), time.perf_counter()
        for _ in range(num_steps):
            root = self._root.clone(recurse=False)
            root.set(self._key, self._action)
            _, self._root = self._env.step_and_maybe_reset(root)
        count = num_steps * self._num_envs
        rate = count / (time.perf_counter() - began)
        return rate, usage_of(pids).since(before).run_ns / 1e3 / count


def measure(case: Case, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float]]:
    """Return rates and processor times by kind, and the seconds of starts: TorchRL's, the facade's first and next."""
    import torchrl.envs

    from envherd.executor import ParallelEnv
    from envherd.executor.facades.torchrl import ParallelEnv as Facade

    def started(make: Callable[[], Any]) -> tuple[Any, float]:
        began = time.perf_counter()
        env = make()
        env.reset()
        return env, time.perf_counter() - began

    num = case.num_envs
    first, first_s = started(lambda: Facade(num, case.make, num_processes=2))
    first.close()
    facade, next_s = started(lambda: Facade(num, case.make, num_processes=2))
    theirs, theirs_s = started(lambda: torchrl.envs.ParallelEnv(num, case.make, mp_start_method="spawn"))
    native = ParallelEnv(num, case.native, num_workers=2, seed=0)
    envs = {"torchrl": theirs, "facade": facade, "native": native}
    turns = {kind: _Turns(env, num) for kind, env in envs.items()}
    rates: dict[str, list[float]] = {kind: [] for kind in envs}
    costs: dict[str, list[float]] = {kind: [] for kind in envs}
    for _ in range(rounds):
        for kind, turn in turns.items():
            rate, cost = turn.run(case.num_steps // 6 if kind == "torchrl" else case.num_steps)
            rates[kind].append(rate)
            costs[kind].append(cost)
    for env in envs.values():
        env.close()
    return rates, costs, [theirs_s, first_s, next_s]


def _ratio(mine: list[float], others: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(mine, others, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def main() -> None:
    """Read the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = Table(
        "script", "torchrl /s", "facade /s", "native /s", "facade / torchrl", "facade / native", "us", "start s"
    )
    for name in arguments.cases or CASES:
        rates, costs, starts = measure(CASES[name], arguments.rounds)
        table.add_row(
            name,
            *(f"{statistics.median(rate):,.0f}" for rate in rates.values()),
            _ratio(rates["facade"], rates["torchrl"]),
            _ratio(rates["facade"], rates["native"]),
            " ".join(f"{statistics.median(cost):,.0f}" for cost in costs.values()),
            " ".join(f"{seconds:.1f}" for seconds in starts),
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
