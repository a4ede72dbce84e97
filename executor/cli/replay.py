"""`envherd replay DIR`: repeats the actions of a stored rollout and compares the results. Capsules: see `rerun`.

Guarantees: nothing that the directory names is imported or called, unless the command line names it also.
"""

from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from envherd.executor.cli.commands import carry_out, started
from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.media import Pictures
from envherd.executor.cli.options import Replay
from envherd.executor.cli.rerun import Rerun
from envherd.executor.cli.storing import StoreError, load_rollout, refuse_code
from envherd.workers.adapters.env_names import Made, made_for

#: Leaves that two runs cannot have in common.
_NOT_COMPARED = {("interrupted",), ("episode", "time")}


def run(options: Replay) -> int:
    """Run a rollout or an episode again; return the exit code."""
    is_named = options.env is not None or options.trust
    if options.directory.is_file():
        rerun = Rerun(options)
        return carry_out(rerun.prepare, rerun.report, searches_here=is_named)
    return carry_out(
        lambda: _prepare(options),
        lambda prepared: _report(options, *prepared),
        searches_here=is_named,
    )


def _prepare(options: Replay) -> tuple[TensorDictBase, dict[str, Any], Made, Pictures]:
    """Check the options before envs start.

    Returns:
        The stored batch `[N, T]`, its facts, with the env that the command line or else the directory names, the
        factory and arguments of this env, and the pictures.

    Raises:
        StoreError: the directory holds no rollout, or names code that the command line does not.
        FactoryError: no such env.
    """
    data, facts = load_rollout(options.directory)
    refuse_code(options, facts["env"], facts["env_kwargs"])
    pictures = Pictures(options.gif, options.png, data.shape[1])
    facts["env"] = facts["env"] if options.env is None else options.env
    kwargs = facts["env_kwargs"] if options.env_kwargs is None else options.env_kwargs
    return (
        data,
        facts,
        made_for(
            facts["env"],
            kwargs,
            facts["max_steps"],
            with_frames=pictures.are_wanted,
        ),
        pictures,
    )


def _report(
    options: Replay,
    data: TensorDictBase,
    facts: dict[str, Any],
    made: Made,
    pictures: Pictures,
) -> int:
    """Run the rollout again and report; return the exit code."""
    console = Console(quiet=options.quiet)
    env = facts["env"]
    difference = _replay(options, data, facts, made, pictures)
    for path in pictures.write(f"{env}, again").values():
        console.print(f"{path} written", highlight=False)
    if difference:
        Console(stderr=options.quiet).print(
            Text(f"{env} differs: {difference}", "bold red"),
            soft_wrap=True,
        )
        return EXIT_FAILED
    console.print(
        Text(
            f"{env}: {data.shape[1]} steps of {data.shape[0]} envs are equal to those stored.",
            "green",
        ),
        soft_wrap=True,
    )
    return 0


def _replay(
    options: Replay,
    data: TensorDictBase,
    facts: dict[str, Any],
    made: Made,
    pictures: Pictures,
) -> str:
    """Run the rollout again; return the first difference as text, or an empty string."""
    console = Console(quiet=options.quiet)
    num_envs, num_steps = data.shape[:2]
    difference = ""
    with console.status(f"starting {num_envs} envs"):
        env = started(
            made,
            num_envs,
            is_drawn=pictures.are_wanted,
            num_workers=options.workers,
            seed=facts["seed"],
        )
    with env, console.status("stepping"), torch.no_grad():
        inputs = [leaf.key for leaf in (*env.spec.action, *env.spec.state)]
        if missing := [key for key in inputs if data.get(key, None) is None]:
            raise StoreError(
                f"replay failed: expected {missing[0]} in {options.directory}, as {facts['env']} takes it."
            )
        root = env.reset()
        pictures.look(env, 0, root)
        for step in range(num_steps):
            then = data[:, step]
            # Inputs are repeated, so they cannot differ.
            difference = difference or _difference(step, then, root, {*inputs})
            for key in inputs:
                root.set(key, then[key].clone())
            td, root = env.step_and_maybe_reset(root)
            difference = difference or _difference(
                step,
                then["next"],
                td["next"],
                set(),
                "next/",
            )
            pictures.look(env, step + 1, td["next"])
            # Pictures show the whole rollout.
            if difference and not pictures.are_wanted:
                break
    return difference


def _difference(
    step: int,
    stored: TensorDictBase,
    found: TensorDictBase,
    without: set[Any],
    prefix: str = "",
) -> str:
    """Return the first leaf of the envs in which two batches `[N]` differ, as text; empty if none does."""
    for one, value in found.items(include_nested=True, leaves_only=True):
        key = (one,) if isinstance(one, str) else one
        is_compared = (
            isinstance(value, torch.Tensor) and not {key, key[-2:]} & _NOT_COMPARED
        )
        if key in without or not is_compared:
            continue
        name = prefix + "/".join(key)
        other = stored.get(key, None)
        if not isinstance(other, torch.Tensor) or other.shape != value.shape:
            got = (
                "none"
                if not isinstance(other, torch.Tensor)
                else f"shape {list(other.shape)}"
            )
            return f"{name} has shape {list(value.shape)}, stored was {got}."
        is_same = (value == other) | ((value != value) & (other != other))  # noqa: PLR0124  # NaN equals NaN here
        rows = (~is_same.reshape(len(value), -1).all(1)).nonzero().flatten().tolist()
        if rows:
            return f"{name} of env {rows[0]} at step {step}."
    return ""
