"""`envherd check ENV`: checks each rule of the partial-reset contract on an env."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.option_values import Env, EnvKwargs

if TYPE_CHECKING:
    from envherd.workers.testing.contract import Contract


@dataclass(frozen=True, kw_only=True)
class Check:
    """Run an env with random actions and check the rules that training relies on.

    The command builds and steps the env in this process, as a worker would. The exit code is 1 if a rule is broken or
    no episode ended.
    """

    env: Env
    steps: Annotated[int, typer.Option(min=1, help="Steps of each of two envs; episodes must end within them.")] = 200
    random: Annotated[
        bool,
        typer.Option("--random", help="Skip the comparisons of two runs, for envs that seeds do not determine."),
    ] = False
    together: Annotated[
        int,
        typer.Option(min=0, help="Also compare this many envs in one process with envs in a process each."),
    ] = 0
    env_kwargs: EnvKwargs = None

    def run(self) -> int:
        """Check every rule and print a line for each; return the exit code."""
        from envherd.executor.cli.commands import carry_out
        from envherd.executor.cli.env_names import factory_for
        from envherd.workers.testing.contract import Contract

        return carry_out(
            lambda: factory_for(self.env),
            lambda factory: self._check(
                Contract(
                    functools.partial(factory, **self.env_kwargs or {}),
                    num_steps=self.steps,
                    is_deterministic=not self.random,
                    together=self.together,
                )
            ),
        )

    def _check(self, contract: Contract) -> int:
        """Check and print every rule; return the exit code."""
        from envherd.workers.testing.compare import ContractViolation
        from envherd.workers.testing.contract import NoEpisodeEnd

        console, num_broken = Console(), 0
        for rule in sorted(contract.rules):
            what = f"{rule:2}  {contract.TITLES[rule]}"
            try:
                with console.status(what):
                    contract.check(rule)
            except NoEpisodeEnd as error:
                console.print(Text("nothing was proved: ", "bold red").append(str(error), "default"), soft_wrap=True)
                return EXIT_FAILED
            except ContractViolation as error:
                num_broken += 1
                console.print(Text("broken  ", "bold red").append(what, "default"), soft_wrap=True)
                console.print(Text(f"            {error}"), soft_wrap=True)
                continue
            is_partial = not contract.is_deterministic and rule in contract.COMPARES
            mark = Text("skipped " if is_partial else "ok      ", "yellow" if is_partial else "green")
            console.print(mark.append(what, "default"), soft_wrap=True)
        if num_broken:
            broken = f"{self.env} breaks {num_broken} of {len(contract.rules)} rules."
            console.print(Text(broken, "bold red"), soft_wrap=True)
            return EXIT_FAILED
        proof = f"{contract.num_steps} steps of 2 envs, {contract.num_ends} ends of episodes."
        console.print(Text(f"{self.env} keeps the contract: {proof}", "green"), soft_wrap=True)
        return 0
