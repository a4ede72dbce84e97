"""`envherd replay DIR`: repeats the actions of a stored rollout and compares the results.

Guarantees: nothing that the directory names is imported, called or put into the environment, unless the command line
names it also. Of its `ExecutorOptions` only those that change data are used.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.option_values import EnvKwargs, Gif, Quiet, Sheet, Workers, read_keyword_arguments

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

    from envherd.executor.cli.commands import Made
    from envherd.executor.options import ExecutorOptions

#: The options of a stored rollout that a replay uses. They change data, and can run no code.
_OPTIONS = (
    *("first_env_id", "episode_seeds", "episode_statistics", "infos", "isolate_rng", "env_type", "check_actions"),
)
#: Leaves that two runs cannot have in common.
_NOT_COMPARED = {("interrupted",), ("episode", "time")}


@dataclass(frozen=True)
class _Stored:
    """What to run again.

    Attributes:
        data: the batch `[N, T]`.
        env: the name of the env, from the command line or else from the directory.
        made: its factory and keyword arguments.
        seed: the root seed.
        options: of the executor.
        unused: names of the stored options that are not used.
    """

    data: TensorDictBase
    env: str
    made: Made
    seed: int
    options: ExecutorOptions
    unused: list[str]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Repeat the actions of a stored rollout from the same seed, and compare what the envs return.

    The exit code is 0 if all observations, rewards and flags are equal, and 1 at the first difference. DIR runs no
    code: an env that it cannot just look up in an installed package must be named by --env.
    """

    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `envherd rollout --out DIR` wrote.", show_default=False)
    ]
    env: Annotated[str | None, typer.Option(metavar="ENV", help="Run this env, in place of the one in DIR.")] = None
    env_kwargs: EnvKwargs = None
    workers: Workers = None
    gif: Gif = None
    png: Sheet = None
    quiet: Quiet = False

    def run(self) -> int:
        """Run a rollout again; return the exit code."""
        from envherd.executor.cli.commands import carry_out

        return carry_out(self._prepare, self._report, searches_here=self.env is not None)

    @property
    def _wants_frames(self) -> bool:
        return self.gif is not None or self.png is not None

    def _prepare(self) -> _Stored:
        """Check the options before envs start.

        Raises:
            StoreError: the directory holds no rollout, or names code that the command line does not.
            FactoryError: no such env.
        """
        from envherd.executor.cli.commands import make, with_display
        from envherd.executor.cli.media import require_pillow
        from envherd.executor.cli.storing import StoreError, load_rollout
        from envherd.executor.options import ExecutorOptions

        data, facts = load_rollout(self.directory)
        self._refuse_code(facts)
        if self._wants_frames:
            require_pillow()
        env = facts["env"] if self.env is None else self.env
        kwargs = facts["env_kwargs"] if self.env_kwargs is None else read_keyword_arguments(self.env_kwargs)
        kept = {name: value for name, value in facts["options"].items() if name in _OPTIONS}
        if kept.get("infos") in ("plain", "pickle"):  # dicts are not stored, and pickles run code
            del kept["infos"]
        try:
            options = ExecutorOptions(**kept)
        except (TypeError, ValueError) as error:
            raise StoreError(f"reading {self.directory} failed: {error}") from None
        return _Stored(
            data,
            env,
            make(env, facts["max_steps"], kwargs, with_frames=self._wants_frames),
            facts["seed"],
            with_display(options, is_drawn=self._wants_frames),
            sorted(facts["options"].keys() - kept.keys()),
        )

    def _refuse_code(self, facts: dict[str, Any]) -> None:
        """Refuse a directory that names code, unless the command line names it.

        Some envs import or open what texts among their keyword arguments name, so these count as code.
        """
        from envherd.executor.cli.env_names import is_only_looked_up
        from envherd.executor.cli.storing import StoreError

        env, kwargs = facts["env"], facts["env_kwargs"]
        refused, accepting = [], ""
        if self.env is None and not is_only_looked_up(env):
            refused.append(f"env: {env}")
            accepting += f" --env {shlex.quote(env)}"
        if self.env_kwargs is None and _has_text(kwargs):
            refused.append(f"env_kwargs: {json.dumps(kwargs)}")
            accepting += f" --env-kwargs {shlex.quote(json.dumps(kwargs))}"
        if refused:
            named = "" if self.env is None else f" --env {shlex.quote(self.env)}"
            names = "\n  ".join(refused)
            raise StoreError(
                f"replay failed: expected an env that is looked up in an installed package, without texts in its "
                f"keyword arguments. {self.directory} names what can run any code:\n  {names}\n"
                f"If you trust it, run\n  envherd replay {shlex.quote(str(self.directory))}{named}{accepting}"
            )

    def _report(self, stored: _Stored) -> int:
        """Run the rollout again and report; return the exit code."""
        console = Console(quiet=self.quiet)
        if stored.unused:
            names = ascii(", ".join(stored.unused))[1:-1]
            console.print(Text(f"options of the stored rollout that a replay does not use: {names}"), soft_wrap=True)
        difference = self._replay(stored, console)
        if difference:
            text = Text(f"{stored.env} differs: {difference}", "bold red")
            Console(stderr=self.quiet).print(text, soft_wrap=True)
            return EXIT_FAILED
        same = f"{stored.env}: {stored.data.shape[1]} steps of {stored.data.shape[0]} envs are equal to those stored."
        console.print(Text(same, "green"), soft_wrap=True)
        return 0

    def _replay(self, stored: _Stored, console: Console) -> str:
        """Run the rollout again; return the first difference as text, or an empty string."""
        import torch

        from envherd.executor.cli.media import FrameLog, write_pictures
        from envherd.executor.cli.storing import StoreError
        from envherd.executor.parallel import ParallelEnv
        from envherd.executor.show.camera import Camera

        factory, kwargs = stored.made
        data = stored.data
        num_envs, num_steps = data.shape[:2]
        how: dict[str, Any] = {"num_workers": self.workers, "seed": stored.seed, "options": stored.options}
        frames = FrameLog(num_steps) if self._wants_frames else None
        difference = ""
        with console.status(f"starting {num_envs} envs"):
            env = ParallelEnv(num_envs, factory, env_kwargs=kwargs or None, **how)
        with env, console.status("stepping"), torch.no_grad():
            camera = Camera(env)
            inputs = [leaf.key for leaf in (*env.spec.action, *env.spec.state)]
            if missing := [key for key in inputs if data.get(key, None) is None]:
                raise StoreError(f"replay failed: expected {missing[0]} in {self.directory}, as {stored.env} takes it.")
            root = env.reset()
            if frames is not None:
                frames.add(0, camera.look(root))
            for step in range(num_steps):
                then = data[:, step]
                difference = difference or _difference(step, then, root, {*inputs})
                for key in inputs:
                    root.set(key, then[key].clone())
                td, root = env.step_and_maybe_reset(root)
                difference = difference or _difference(step, then["next"], td["next"], set(), "next/")
                if frames is not None and frames.wants(step + 1):
                    frames.add(step + 1, camera.look(td["next"]))
                if difference and frames is None:
                    break
        for path in write_pictures(frames, self.gif, self.png, f"{stored.env}, again").values():
            console.print(f"{path} written", highlight=False)
        return difference


def _has_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    return any(map(_has_text, value)) if isinstance(value, list) else isinstance(value, str)


def _difference(step: int, stored: TensorDictBase, found: TensorDictBase, without: set[Any], prefix: str = "") -> str:
    """Return the first leaf of the envs in which two batches `[N]` differ, as text; empty if none does."""
    import torch

    for key, value in _tensors(found):
        if key in without or key in _NOT_COMPARED or key[-2:] in _NOT_COMPARED:
            continue
        name, other = prefix + "/".join(key), stored.get(key, None)
        if not isinstance(other, torch.Tensor) or other.shape != value.shape:
            got = "none" if not isinstance(other, torch.Tensor) else f"shape {list(other.shape)}"
            return f"{name} has shape {list(value.shape)}, stored was {got}."
        is_same = (value == other) | ((value != value) & (other != other))  # noqa: PLR0124  # NaN equals NaN here
        rows = (~is_same.reshape(len(value), -1).all(1)).nonzero().flatten().tolist()
        if rows:
            return f"{name} of env {rows[0]} at step {step}."
    return ""


def _tensors(td: TensorDictBase) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    import torch

    for key, value in td.items(include_nested=True, leaves_only=True):
        if isinstance(value, torch.Tensor):
            yield (key,) if isinstance(key, str) else key, value
