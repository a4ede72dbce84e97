"""`envherd replay DIR`: repeats the actions of a stored rollout and compares the results. Capsules: see `rerun`.

Guarantees: nothing that the directory names is imported or called, unless the command line names it also.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.option_values import EnvKwargs, Gif, Quiet, Sheet, Workers, picture

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

    from envherd.executor.cli.env_names import Made
    from envherd.executor.cli.media import Pictures

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
    """

    data: TensorDictBase
    env: str
    made: Made
    seed: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Repeat the actions of a stored rollout, or of the episode in a crash capsule, from the same seed.

    The exit code of a rollout is 0 if all observations, rewards and flags are equal, and 1 at the first difference.
    That of a capsule is 0 if the env fails again in the same step and the same way, 1 if anything else happens, and 3
    if all steps go through. PATH runs no code: an env that it cannot just look up in an installed package must be named
    by --env.
    """

    directory: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A folder that `envherd rollout --out DIR` wrote, or a file of ExecutorOptions(capsules=DIR).",
            show_default=False,
        ),
    ]
    env: Annotated[str | None, typer.Option(metavar="ENV", help="Run this env, in place of the one in PATH.")] = None
    env_kwargs: EnvKwargs = None
    workers: Workers = None
    gif: Gif = None
    png: Sheet = None
    trust: Annotated[
        bool, typer.Option("--trust", help="Run whatever code a capsule names: import its env, load its pickle.")
    ] = False
    pdb: Annotated[bool, typer.Option("--pdb", help="Of a capsule: stop in the debugger before the last step.")] = False
    record: Annotated[
        Path | None, typer.Option(metavar="PATH", callback=picture(".mp4"), help="Of a capsule: write a video (MP4).")
    ] = None
    quiet: Quiet = False

    def run(self) -> int:
        """Run a rollout or an episode again; return the exit code."""
        from envherd.executor.cli.commands import carry_out

        if self.directory.is_file():
            from envherd.executor.cli.rerun import Rerun

            if self.workers or self.gif or self.png:
                raise typer.BadParameter("expected no --workers, --gif or --png for a capsule, which has one env.")
            rerun = Rerun(self.directory, self.env, self.env_kwargs, self.trust, self.pdb, self.record, self.quiet)
            is_named = self.env is not None or self.trust
            return carry_out(rerun.prepare, rerun.report, searches_here=is_named)
        if self.trust or self.pdb or self.record:
            raise typer.BadParameter(f"expected a capsule for --trust, --pdb and --record, got {self.directory}.")
        return carry_out(self._prepare, lambda prepared: self._report(*prepared), searches_here=self.env is not None)

    def _prepare(self) -> tuple[_Stored, Pictures]:
        """Check the options before envs start.

        Raises:
            StoreError: the directory holds no rollout, or names code that the command line does not.
            FactoryError: no such env.
        """
        from envherd.executor.cli.env_names import made_for
        from envherd.executor.cli.media import Pictures
        from envherd.executor.cli.storing import load_rollout, refuse_code

        data, facts = load_rollout(self.directory)
        refuse_code(self.directory, (facts["env"], facts["env_kwargs"]), (self.env, self.env_kwargs))
        pictures = Pictures(self.gif, self.png, data.shape[1])
        env = facts["env"] if self.env is None else self.env
        kwargs = facts["env_kwargs"] if self.env_kwargs is None else self.env_kwargs
        made = made_for(env, kwargs, facts["max_steps"], with_frames=pictures.are_wanted)
        return _Stored(data, env, made, facts["seed"]), pictures

    def _report(self, stored: _Stored, pictures: Pictures) -> int:
        """Run the rollout again and report; return the exit code."""
        console = Console(quiet=self.quiet)
        difference = self._replay(stored, pictures, console)
        for path in pictures.write(f"{stored.env}, again").values():
            console.print(f"{path} written", highlight=False)
        if difference:
            text = Text(f"{stored.env} differs: {difference}", "bold red")
            Console(stderr=self.quiet).print(text, soft_wrap=True)
            return EXIT_FAILED
        same = f"{stored.env}: {stored.data.shape[1]} steps of {stored.data.shape[0]} envs are equal to those stored."
        console.print(Text(same, "green"), soft_wrap=True)
        return 0

    def _replay(self, stored: _Stored, pictures: Pictures, console: Console) -> str:
        """Run the rollout again; return the first difference as text, or an empty string."""
        import torch

        from envherd.executor.cli.commands import started
        from envherd.executor.cli.storing import StoreError

        data = stored.data
        num_envs, num_steps = data.shape[:2]
        how: dict[str, Any] = {"num_workers": self.workers, "seed": stored.seed}
        difference = ""
        with console.status(f"starting {num_envs} envs"):
            env = started(stored.made, num_envs, is_drawn=pictures.are_wanted, **how)
        with env, console.status("stepping"), torch.no_grad():
            inputs = [leaf.key for leaf in (*env.spec.action, *env.spec.state)]
            if missing := [key for key in inputs if data.get(key, None) is None]:
                raise StoreError(f"replay failed: expected {missing[0]} in {self.directory}, as {stored.env} takes it.")
            root = env.reset()
            pictures.look(env, 0, root)
            for step in range(num_steps):
                then = data[:, step]
                difference = difference or _difference(step, then, root, {*inputs})
                for key in inputs:
                    root.set(key, then[key].clone())
                td, root = env.step_and_maybe_reset(root)
                difference = difference or _difference(step, then["next"], td["next"], set(), "next/")
                pictures.look(env, step + 1, td["next"])
                if difference and not pictures.are_wanted:
                    break
        return difference


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
