"""`envherd bench [ENV]`: times an env under envherd, in a serial loop, and under the libraries that run such envs."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from envherd.executor.cli.commands import carry_out, noting_interrupt
from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.option_values import write_text
from envherd.executor.cli.options import Bench
from envherd.executor.machine.machine import usable_cores
from envherd.executor.parallel import ParallelEnv
from envherd.executor.serial import SerialEnv
from envherd.workers.adapters.env_names import factory_for, full_name
from envherd.workers.errors import FactoryError

SCHEMA = "envherd.bench/2"
#: A function that makes a step of all envs, and one that ends them.
Started = tuple[Callable[[], object], Callable[[], object]]
_OURS, _MISSING = "envherd", "not installed"


def run(options: Bench) -> int:
    """Measure every library and print a table; return the exit code."""
    return carry_out(lambda: _prepare(options), lambda prepared: _work(options, prepared))


def _prepare(options: Bench) -> dict[str, Callable[[], Started]]:
    """Return name -> what steps the envs.

    Raises:
        FactoryError: no such env, or the other libraries do not run its family.
    """
    kwargs, name = options.env_kwargs, full_name(options.env)
    factory, family = factory_for(name), name.partition(":")[0]
    if family not in ("gymnasium", "python", "meltingpot"):
        raise FactoryError(
            f"bench failed: expected a Gymnasium env or a Melting Pot substrate, which other libraries also run, "
            f"got {name}. `envherd size` measures envs of other families."
        )
    if family == "meltingpot" and kwargs:
        raise FactoryError(
            "bench failed: expected no --env-kwargs with Melting Pot, which TorchRL's env does not take."
        )
    make_env = functools.partial(factory, **kwargs) if kwargs else factory
    return _contenders(family, make_env, options.envs, min(options.envs, options.workers or usable_cores()))


def _work(options: Bench, contenders: dict[str, Callable[[], Started]]) -> int:
    """Measure, print and write; return the exit code."""
    console = Console(stderr=options.json == "-", quiet=options.quiet)
    num_rounds, seconds = (3, 0.2) if options.quick else (5, 1.0)
    with console.status("") as status:
        rates, failures = _measure(contenders, options.envs, num_rounds, seconds, status.update)
    found = _summary(rates, failures)
    console.print(_table(f"{options.env}, {options.envs} envs", found))
    for name, why in failures.items():
        if why != _MISSING:
            Console(stderr=True).print(f"{name}: {why}", style="red", markup=False, soft_wrap=True)
    plain = {"schema": SCHEMA, "env": options.env, "num_envs": options.envs, "libraries": found}

    write_text(options.json, json.dumps(plain, indent=2) + "\n")
    return EXIT_FAILED if _OURS in failures else 0


def _contenders(
    family: str, make_env: Callable[[], Any], num_envs: int, num_workers: int
) -> dict[str, Callable[[], Started]]:
    """Return name -> what steps the envs; libraries that fork come first, before this process has more threads."""
    many = [make_env] * num_envs
    here = {
        "a serial loop": functools.partial(_loop, many),
        "envherd SerialEnv": functools.partial(_ours, functools.partial(SerialEnv, num_envs, make_env, seed=0)),
        _OURS: functools.partial(
            _ours, functools.partial(ParallelEnv, num_envs, make_env, num_workers=num_workers, seed=0)
        ),
    }
    torchrl = {"TorchRL ParallelEnv": functools.partial(_torchrl, family, many)}
    if family == "meltingpot":
        return {**torchrl, **here}
    return {
        "Gymnasium AsyncVectorEnv": functools.partial(_gymnasium, "AsyncVectorEnv", many),
        "SB3 SubprocVecEnv": functools.partial(_sb3, many),
        **torchrl,
        "Gymnasium SyncVectorEnv": functools.partial(_gymnasium, "SyncVectorEnv", many),
        **here,
    }


def _loop(many: list[Callable[[], Any]]) -> Started:
    envs = [make_env() for make_env in many]
    for env in envs:
        env.reset()
    if hasattr(envs[0], "action_spec"):  # a substrate, whose players have an action each
        actions: list[Any] = [[spec.generate_value() for spec in envs[0].action_spec()] for _ in envs]
    else:
        actions = [env.action_space.sample() for env in envs]

    def step() -> None:
        for env, action in zip(envs, actions, strict=True):
            answer = env.step(action)
            if answer.last() if hasattr(answer, "last") else answer[2] or answer[3]:
                env.reset()

    return step, lambda: [env.close() for env in envs]


def _ours(start: Callable[[], Any]) -> Started:
    env = start()
    root = env.reset()
    drawn = env.rand_action()
    actions = [(leaf.key, drawn[leaf.key]) for leaf in env.action_spec]

    def step() -> None:
        nonlocal root
        for key, value in actions:
            root.set(key, value)
        _, root = env.step_and_maybe_reset(root)

    return step, env.close


def _gymnasium(kind: str, many: list[Callable[[], Any]]) -> Started:
    import gymnasium

    env = getattr(gymnasium.vector, kind)(many)
    env.reset()
    return functools.partial(env.step, env.action_space.sample()), env.close


def _sb3(many: list[Callable[[], Any]]) -> Started:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv(many, start_method="fork")
    env.reset()
    return functools.partial(env.step, np.stack([env.action_space.sample() for _ in many])), env.close


def _torchrl(family: str, many: list[Callable[[], Any]]) -> Started:
    from torchrl.envs import GymWrapper, MeltingpotEnv, ParallelEnv

    def make() -> Any:
        if family == "meltingpot":
            return MeltingpotEnv(many[0].name)  # type: ignore[attr-defined]  # of a `MeltingPotFactory`
        return GymWrapper(many[0](), categorical_action_encoding=True)

    env = ParallelEnv(len(many), make, mp_start_method="fork")
    root = env.reset()
    key = env.action_key
    actions = env.rand_action(root.clone()).get(key)

    def step() -> None:
        nonlocal root
        _, root = env.step_and_maybe_reset(root.set(key, actions))

    return step, env.close


def _measure(
    contenders: dict[str, Callable[[], Started]],
    num_envs: int,
    num_rounds: int,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Start all, run them in turns in random order, and end them.

    Returns:
        name -> env-steps per second of each round, and name -> why it has none.
    """
    import envherd.workers.adapters.hosts.light_tensorboard  # noqa: F401  # keeps SB3, TorchRL from TensorFlow

    torch.set_num_threads(1)
    order, rates, failures = random.Random(0), dict[str, list[float]](), dict[str, str]()
    steps: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other libraries
        # An interrupt while a process is forked would be lost.
        pressed = stack.enter_context(noting_interrupt())
        stack.callback(_kill_children)
        for name, start in contenders.items():
            _end_if(pressed)
            say(f"starting {name}")
            try:
                steps[name], end = start()
                stack.callback(_end_quietly, end)
            except ImportError:
                failures[name] = _MISSING
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
        for number in range(num_rounds):
            say(f"round {number + 1} of {num_rounds}")
            for name in order.sample(list(steps), len(steps)):
                _end_if(pressed)
                try:
                    rates.setdefault(name, []).append(num_envs * _calls_per_s(steps[name], seconds))
                except Exception as error:
                    failures[name] = f"{type(error).__name__}: {error}"
                    del steps[name], rates[name]
    return rates, failures


def _end_if(pressed: list[int]) -> None:
    if pressed:
        raise KeyboardInterrupt


def _end_quietly(end: Callable[[], object]) -> None:
    """Hide what the end of a library raises, e.g. because one of its processes has died."""
    with contextlib.suppress(Exception):
        end()


def _kill_children() -> None:
    """Kill processes that a library has not ended."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def _calls_per_s(step: Callable[[], object], seconds: float) -> float:
    """Return the calls per second, after a warm-up of a fifth of the time, because the processes have slept."""
    for span in (0.2 * seconds, seconds):
        count, began = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - began < span:
            step()
            count += 1
    return count / (time.perf_counter() - began)


def _summary(rates: dict[str, list[float]], failures: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return name -> figures, the fastest first.

    Returns:
        "status"; and if measured "steps_per_s", the median over the rounds, and "envherd_is", the quartiles of
        envherd's speed divided by this one, round by round (None if envherd failed).
    """
    ours, found = rates.get(_OURS), {}
    for name in sorted(rates, key=lambda one: -float(np.median(rates[one]))):
        ratios = None if ours is None else np.quantile(np.divide(ours, rates[name]), (0.25, 0.5, 0.75)).tolist()
        found[name] = {"status": "measured", "steps_per_s": float(np.median(rates[name])), "envherd_is": ratios}
    return {**found, **{name: {"status": why} for name, why in failures.items()}}


def _table(title: str, found: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("env-steps/s", justify="right")
    table.add_column("envherd is", justify="right")
    for name, one in found.items():
        if one["status"] != "measured":
            table.add_row(name, "-", one["status"] if one["status"] == _MISSING else "failed", style="dim")
            continue
        low, mid, high = one["envherd_is"] or (float("nan"),) * 3
        table.add_row(
            name,
            f"{one['steps_per_s']:,.0f}",
            "" if name == _OURS else f"{mid:.2f}x ({low:.2f}-{high:.2f})",
            style="bold" if name == _OURS else "",
        )
    return table
