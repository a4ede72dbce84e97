"""`envherd replay CAPSULE`: runs the episode of an env that has failed again, up to the failure.

The env runs in a worker, so the command survives its crash; with --pdb it runs in this process. It is built as the
failed one was: same adapter, same options, global generators seeded in the same way. Earlier episodes are not repeated.

Guarantees: nothing that the capsule names is imported, called or unpickled, unless the command line names it also, or
trusts the capsule.
"""

import contextlib
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
from envherd.executor.cli.commands import started
from envherd.executor.cli.exit_codes import EXIT_FAILED, EXIT_NO_FAILURE
from envherd.executor.cli.media import Pictures
from envherd.executor.cli.options import Replay
from envherd.executor.cli.storing import has_text, refuse_code
from envherd.executor.guests.capsules.file import CapsuleError, load_capsule
from envherd.executor.guests.capsules.writer import FATAL, OPTIONS, digest
from envherd.executor.options import ExecutorOptions
from envherd.executor.processes.worker_process import describe_exit
from envherd.executor.serial import SerialEnv
from envherd.shm.specs import EnvSpec, Key
from envherd.workers.adapters.env_names import Made, made_for
from envherd.workers.errors import EnvError, WorkerLost, WorkerTimeout


class Rerun:
    """The command for one capsule."""

    _num_steps = 0  # of the episode, that were begun
    _difference = ""  # before the failure, in words

    def __init__(self, options: Replay) -> None:
        self._options = options
        self._path = options.directory

    def prepare(self) -> None:
        """Read the capsule and find its env; build nothing.

        Raises:
            CapsuleError, StoreError: no capsule, or one that cannot be run, or names code that the command line does
                not.
            FactoryError: no such env.
        """
        self._capsule = load_capsule(self._path)
        facts = self._capsule.facts
        if lost := [what for what in facts["missing"] if what in FATAL]:
            raise CapsuleError(
                f"replay failed: expected all of the episode, but {self._path} lacks {', '.join(lost)}."
            )
        if any(
            len(values) != facts["num_steps"]
            for values in self._capsule.inputs.values()
        ):
            raise CapsuleError(
                f"reading {self._path} failed: expected actions of {facts['num_steps']} steps."
            )
        try:
            self._executor_options = ExecutorOptions(
                **{name: facts["options"][name] for name in OPTIONS},
                first_env_id=facts["env_id"],
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
        facts = self._capsule.facts
        name = self._options.env or facts["env"]
        kwargs: dict[str, Any] | None = self._options.env_kwargs
        if kwargs is None:
            kwargs = facts["env_kwargs"]
        if self._options.trust:
            sys.path += [folder for folder in facts["search"] if folder not in sys.path]
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
            if has_text(facts["reset_options"]):
                raise CapsuleError(
                    f"replay failed: expected resets without texts, which may name code, but {self._path} has "
                    f"{facts['reset_options']}. If you trust it, pass --trust."
                )
            refuse_code(
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
        if name == facts["env"] and facts["fields"]:
            try:
                factory = replace(factory, **facts["fields"])
            except TypeError as error:
                raise CapsuleError(
                    f"reading {self._path} failed: expected options of {name}, got {error}."
                ) from None
        return Made(factory, kwargs)

    def report(self, _: None) -> int:
        """Run the episode again and report; return the exit code."""
        console = Console(quiet=self._options.quiet)
        facts = self._capsule.facts
        failure = _in_words(
            facts["failure"],
            facts["failure"].get("phase"),
            facts["num_steps"],
        )
        console.print(
            f"env {facts['env_id']}, episode {facts['episode']}, seed {facts['seed']}, {facts['num_steps']} steps: "
            f"{failure}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        notes = [f"note: the capsule lacks {what}." for what in facts["missing"]]
        if facts["episode"]:
            notes.append(
                "note: its env had earlier episodes; an env whose state outlives a reset may behave otherwise here."
            )
        for note in notes:
            console.print(Text(note, "yellow"), soft_wrap=True)
        found, difference = self._run()
        if self._options.record is not None:
            console.print(f"{self._options.record} written", highlight=False)
        if not found:
            code = EXIT_NO_FAILURE
            text = f"It did not fail: {facts['num_steps']} steps went through."
            if difference:
                code = EXIT_FAILED
                text = f"It did not fail, and differed before: {difference}"
        elif found == failure:
            code = 0
            text = f"It failed again: {found}"
        else:
            code = EXIT_FAILED
            text = f"It failed otherwise: {found}"
        if code != EXIT_FAILED and difference and found:
            text += f" (But {difference})"
        where = Console(stderr=self._options.quiet) if code else console
        where.print(Text(text, "green" if code == 0 else "bold red"), soft_wrap=True)
        return code

    def _run(self) -> tuple[str, str]:
        """Run the episode again; return how it failed and how it differed before, each empty if it did not."""
        how: dict[str, Any] = {
            "seed": self._capsule.facts["root_seed"],
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
        facts = self._capsule.facts
        last = facts["num_steps"]
        root = self._stopping(
            env,
            lambda: env.reset(
                seed=[facts["seed"]],
                list_of_kwargs=[facts["reset_options"] or {}],
            ),
        )
        self._pictures.look(env, 0, root)
        while self._num_steps < last:
            if self._num_steps == last - 1 and facts["observation"] not in (
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
        if not (
            self._options.pdb and self._num_steps == self._capsule.facts["num_steps"]
        ):
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
