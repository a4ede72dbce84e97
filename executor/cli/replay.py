"""`envherd replay PATH`: runs a stored rollout again and compares, or runs the episode of a crash capsule again.

Of a capsule, the env runs in a worker, so the command survives its crash; with --pdb it runs in this process. It is
built as the failed one was: same adapter, same options, global generators seeded in the same way. Earlier episodes are
not repeated.

Guarantees: nothing that the path names is imported, called or unpickled, unless the command line names it also, or
trusts the capsule.
"""

import contextlib
import functools
import json
import pickle
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from envherd.executor.batched import BatchedEnv
from envherd.executor.cli.commands import StoreError, carry_out, load_rollout, started
from envherd.executor.cli.media import Pictures
from envherd.executor.cli.options import EXIT_FAILED, EXIT_NO_FAILURE, Replay
from envherd.executor.guests.capsules import (
    FATAL,
    OPTIONS,
    CapsuleError,
    digest,
    load_capsule,
)
from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.worker_process import describe_exit
from envherd.executor.serial import SerialEnv
from envherd.shm.specs import EnvSpec, Key
from envherd.workers.adapters.env_names import Made, is_only_looked_up, made_for
from envherd.workers.errors import EnvError, WorkerLost, WorkerTimeout

#: Leaves that two runs cannot have in common.
_NOT_COMPARED = {("interrupted",), ("next", "interrupted"), ("episode", "time")}


def run(options: Replay) -> int:
    """Run a rollout or an episode again; return the exit code."""
    is_named = options.env is not None or options.trust
    if options.directory.is_file():
        return carry_out(
            functools.partial(_Rerun, options),
            _Rerun.report,
            searches_here=is_named,
        )
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
    _refuse_code(options, facts["env"], facts["env_kwargs"])
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
    difference = _replay(options, console, data, facts, made, pictures)
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
    console: Console,
    data: TensorDictBase,
    facts: dict[str, Any],
    made: Made,
    pictures: Pictures,
) -> str:
    """Run the rollout again; return the first difference as text, or an empty string."""
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
            for key in inputs:
                root.set(key, then[key].clone())
            td, root = env.step_and_maybe_reset(root)
            difference = difference or _difference(step, then, td)
            pictures.look(env, step + 1, td["next"])
            # Pictures show the whole rollout.
            if difference and not pictures.are_wanted:
                break
    return difference


def _difference(
    step: int,
    stored: TensorDictBase,
    found: TensorDictBase,
) -> str:
    """Return the first leaf of the envs in which two batches `[N]` of a step differ, as text; empty if none does."""
    for one, value in found.items(include_nested=True, leaves_only=True):
        key = (one,) if isinstance(one, str) else one
        if not isinstance(value, torch.Tensor) or key[-2:] in _NOT_COMPARED:
            continue
        name = "/".join(key)
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


def _refuse_code(
    options: Replay,
    env: str,
    kwargs: dict[str, Any],
    or_else: str = "",
) -> None:
    """Refuse a file or folder that names code, unless the command line names it.

    Some envs import or open what texts among their keyword arguments name, so these count as code.

    Args:
        options: of the command line: the path of the file, and the env and the keyword arguments that they name.
        env: that the file names.
        kwargs: keyword arguments that the file names.
        or_else: a further line for the message.

    Raises:
        StoreError: with the command that accepts it.
    """
    given = options.env_kwargs
    is_env_safe = options.env is not None or is_only_looked_up(env)
    if is_env_safe and (given is not None or not _has_text(kwargs)):
        return
    passed = json.dumps(kwargs if given is None else given)
    raise StoreError(
        f"replay failed: expected an env that is looked up in an installed package, without texts in its keyword "
        f"arguments. {options.directory} names an env that may run any code: {env} with {json.dumps(kwargs)}.\n"
        f"If you trust it, run\n  envherd replay {shlex.quote(str(options.directory))} "
        f"--env {shlex.quote(options.env or env)} --env-kwargs {shlex.quote(passed)}{or_else}"
    )


def _has_text(value: Any) -> bool:
    """Return whether there is a text in plain data, other than the keys of dicts."""
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    if isinstance(value, list):
        return any(map(_has_text, value))
    return isinstance(value, str)


# ---- capsules --------------------------------------------------------------------------------------


class _Rerun:
    """The command for one capsule. At first it is read and its env is found; nothing is built.

    Raises:
        CapsuleError, StoreError: no capsule, or one that cannot be run, or names code that the command line does not.
        FactoryError: no such env.
    """

    _num_steps = 0  # of the episode, that were begun
    _difference = ""  # before the failure, in words

    def __init__(self, options: Replay) -> None:
        self._options = options
        self._path = options.directory
        self._capsule = load_capsule(self._path)
        self._facts = self._capsule.facts
        if lost := [what for what in self._facts["missing"] if what in FATAL]:
            raise CapsuleError(
                f"replay failed: expected all of the episode, but {self._path} lacks {', '.join(lost)}."
            )
        if any(
            len(values) != self._facts["num_steps"]
            for values in self._capsule.inputs.values()
        ):
            raise CapsuleError(
                f"reading {self._path} failed: expected actions of {self._facts['num_steps']} steps."
            )
        try:
            self._executor_options = ExecutorOptions(
                **{name: self._facts["options"][name] for name in OPTIONS},
                first_env_id=self._facts["env_id"],
                check_actions="off",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CapsuleError(
                f"reading {self._path} failed: expected options of an executor, got {error}"
            ) from None
        self._pictures = Pictures(None, None, 0, mp4=self._options.record)
        self._made = self._find()

    def _find(self) -> Made:
        """Return the factory and its arguments that the command line, or else the capsule, names."""
        pickled = self._capsule.pickled
        name = self._options.env or self._facts["env"]
        kwargs: dict[str, Any] | None = self._options.env_kwargs
        if kwargs is None:
            kwargs = self._facts["env_kwargs"]
        if self._options.trust:
            sys.path += [
                folder for folder in self._facts["search"] if folder not in sys.path
            ]
        if self._options.trust and self._options.env is None and pickled is not None:
            factory, kwargs = pickle.loads(pickled)  # which the user trusts
            return Made(pickle.loads(factory), kwargs)
        if name is None:
            trusted = ""
            if pickled is not None:
                trusted = ", or --trust, which loads the pickled factory"
            raise CapsuleError(
                f"replay failed: expected the name of an env, but {self._path} has none: its factory is not a function "
                f"of a module. Pass --env MODULE:CALLABLE{trusted}. (Capsules(pickle=True) keeps such factories.)"
            )
        if not self._options.trust:
            if _has_text(self._facts["reset_options"]):
                raise CapsuleError(
                    f"replay failed: expected resets without texts, which may name code, but {self._path} has "
                    f"{self._facts['reset_options']}. If you trust it, pass --trust."
                )
            _refuse_code(
                self._options,
                name,
                kwargs,
                f"\nor\n  envherd replay {shlex.quote(str(self._path))} --trust",
            )
        factory, kwargs = made_for(
            name,
            kwargs,
            None,
            with_frames=self._pictures.are_drawn,
        )
        # Another env that the command line names has other fields.
        if name == self._facts["env"] and self._facts["fields"]:
            try:
                factory = replace(factory, **self._facts["fields"])
            except TypeError as error:
                raise CapsuleError(
                    f"reading {self._path} failed: expected options of {name}, got {error}."
                ) from None
        return Made(factory, kwargs)

    def report(self) -> int:
        """Run the episode again and report; return the exit code."""
        console = Console(quiet=self._options.quiet)
        failure = _in_words(
            self._facts["failure"],
            self._facts["failure"].get("phase"),
            self._facts["num_steps"],
        )
        console.print(
            f"env {self._facts['env_id']}, episode {self._facts['episode']}, seed {self._facts['seed']}, "
            f"{self._facts['num_steps']} steps: {failure}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        notes = [f"note: the capsule lacks {what}." for what in self._facts["missing"]]
        if self._facts["episode"]:
            notes.append(
                "note: its env had earlier episodes; an env whose state outlives a reset may behave otherwise here."
            )
        for note in notes:
            console.print(Text(note, "yellow"), soft_wrap=True)
        found, difference = self._run()
        if self._options.record is not None:
            console.print(f"{self._options.record} written", highlight=False)
        code = EXIT_FAILED
        if found == failure:
            code = 0
            text = f"It failed again: {found}"
            if difference:
                text += f" (But {difference})"
        elif found:
            text = f"It failed otherwise: {found}"
        elif difference:
            text = f"It did not fail, and differed before: {difference}"
        else:
            code = EXIT_NO_FAILURE
            text = f"It did not fail: {self._facts['num_steps']} steps went through."
        where = Console(stderr=self._options.quiet) if code else console
        where.print(Text(text, "green" if code == 0 else "bold red"), soft_wrap=True)
        return code

    def _run(self) -> tuple[str, str]:
        """Run the episode again; return how it failed and how it differed before, each empty if it did not."""
        how: dict[str, Any] = {
            "seed": self._facts["root_seed"],
            "options": self._executor_options,
        }
        factory, kwargs = self._made
        try:
            if self._options.pdb:
                env: BatchedEnv = SerialEnv(
                    1,
                    factory,
                    env_kwargs=kwargs or None,
                    **how,
                )
            else:
                env = started(
                    self._made,
                    1,
                    is_drawn=self._pictures.are_drawn,
                    num_workers=1,
                    **how,
                )
        except Exception as error:  # of an env with other arguments, or of a machine that lacks what it needs
            raise CapsuleError(
                f"replay failed: expected an env as {self._path} describes it, got {type(error).__name__}: {error}",
                remote_traceback=getattr(error, "remote_traceback", None)
                if self._options.trust
                else None,
            ) from error
        with env, contextlib.closing(self._pictures), torch.no_grad():
            inputs = self._inputs_of(env)
            try:
                return "", self._repeat(env, inputs)
            except (EnvError, WorkerLost, WorkerTimeout) as error:
                known = error.context
                found = {
                    "error": type(error).__name__,
                    "type": known.get("type_name"),
                    "message": known.get("reason"),
                    "exit_code": known.get("exit_code"),
                }
                return (
                    _in_words(found, known["phase"], self._num_steps),
                    self._difference,
                )

    def _inputs_of(self, env: BatchedEnv) -> dict[Key, np.ndarray]:
        """Return the stored inputs of the episode, under the keys of the env."""
        arrays = self._capsule.inputs.values()
        leaves = [*env.spec.action, *env.spec.state]
        stored = [(array.shape[1:], str(array.dtype)) for array in arrays]
        if stored != (found := [(leaf.shape, leaf.dtype) for leaf in leaves]):
            raise CapsuleError(
                f"replay failed: expected an env with actions of {stored}, got one with {found}."
            )
        # Those of a facade may differ.
        return dict(zip([leaf.key for leaf in leaves], arrays, strict=True))

    def _repeat(self, env: BatchedEnv, inputs: Mapping[Key, np.ndarray]) -> str:
        """Reset and step the env; return what differed, as text.

        Raises:
            EnvError, WorkerLost, WorkerTimeout: the failure.
        """
        last = self._facts["num_steps"]
        root = self._stopping(
            env,
            lambda: env.reset(
                seed=[self._facts["seed"]],
                list_of_kwargs=[self._facts["reset_options"] or {}],
            ),
        )
        self._pictures.look(env, 0, root)
        while self._num_steps < last:
            if self._num_steps == last - 1 and self._facts["observation"] not in (
                None,
                _digest(env.spec, root),
            ):
                self._difference = f"the observation before step {last} is another."
            for key, values in inputs.items():
                root.set(
                    key,
                    torch.from_numpy(values[self._num_steps : self._num_steps + 1]),
                )
            self._num_steps += 1
            root = self._stopping(env, lambda: env.step(root)["next"])  # noqa: B023  # called at once
            self._pictures.look(env, self._num_steps, root)
            if self._num_steps < last:
                if root["done"].any():
                    return f"the episode ended in step {self._num_steps} of {last}."
                root = env.current()
        return self._difference

    def _stopping(
        self,
        env: BatchedEnv,
        call: Callable[[], TensorDictBase],
    ) -> TensorDictBase:
        """Make a call, the last one in the debugger if that is wanted."""
        if not (self._options.pdb and self._num_steps == self._facts["num_steps"]):
            return call()
        pool: Any = env.engine.pool
        return _stop_before(call, pool.adapters[0].env, self._num_steps)


def _digest(spec: EnvSpec, root: TensorDictBase) -> str:
    keys = [leaf.key for leaf in spec.observation if not leaf.is_side]
    return digest(spec, {key: root.get(key)[0].numpy(force=True) for key in keys})


def _in_words(facts: Mapping[str, Any], phase: Any, step: int) -> str:
    """Describe a failure without what may differ from run to run: process ids, addresses, the factory's place.

    Args:
        facts: "error", the name of the class; of what an env raised "type" and "message"; of a loss "exit_code".
        phase: in which it failed.
        step: in which it failed, from 1.
    """
    error = facts.get("error", "")
    exit_code = facts.get("exit_code")
    if error == WorkerLost.__name__:
        what = f"{error} ({describe_exit(exit_code if isinstance(exit_code, int) else None)})"
    elif error == WorkerTimeout.__name__:
        what = f"{error} (a hang)"
    else:
        message = re.sub(
            r"0x[0-9a-fA-F]+",
            "0x...",
            str(facts.get("message", "")).partition(" Built by ")[0],
        )
        what = f"{error} ({facts.get('type', '')}: {message})"
    shown = "".join(one if one.isprintable() else " " for one in what)
    return f"{shown} in step {step}." if phase == "step" else f"{shown} in the reset."


def _stop_before(call: Callable[[], Any], env: Any, step: int) -> Any:
    """Stop in the debugger, then make a call, whose step of the env stops there again. `env` and `step` are shown."""
    from pdb import Pdb

    debugger = Pdb(nosigint=True)
    code = getattr(
        getattr(type(env), "step" if step else "reset", None),
        "__code__",
        None,
    )
    if code is not None:
        debugger.set_break(code.co_filename, code.co_firstlineno, funcname=code.co_name)
    debugger.set_trace()
    try:
        return call()
    finally:
        sys.settrace(None)
