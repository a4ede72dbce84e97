"""Implements `envherd check`, from its options to its exit code."""

from __future__ import annotations

import functools
from typing import Any

from rich.console import Console
from rich.text import Text

from envherd.executor.cli.commands import carry_out
from envherd.executor.cli.env_names import factory_for
from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.workers.testing.compare import ContractViolation
from envherd.workers.testing.contract import Contract, NoEpisodeEnd


def run(env: str, *, num_steps: int, seed: int, is_deterministic: bool, kwargs: dict[str, Any]) -> int:
    """Check every rule and print a line for each; return the exit code. `carry_out` handles errors."""
    settings: dict[str, Any] = {"num_steps": num_steps, "seed": seed, "is_deterministic": is_deterministic}
    return carry_out(
        lambda: factory_for(env),
        lambda factory: _check(env, Contract(functools.partial(factory, **kwargs), **settings)),
    )


def _check(env: str, contract: Contract) -> int:
    """Check every rule and report; return the exit code."""
    console = Console()
    try:
        num_broken = _check_all(contract, console)
    except NoEpisodeEnd as error:
        console.print(Text("nothing was proved: ", "bold red").append(str(error), "default"), soft_wrap=True)
        return EXIT_FAILED
    if num_broken:
        console.print(Text(f"{env} breaks {num_broken} of {len(Contract.RULES)} rules.", "bold red"), soft_wrap=True)
        return EXIT_FAILED
    kept = f"{env} keeps the contract: {contract.num_steps} steps of 2 envs, {contract.num_ends} ends of episodes."
    console.print(Text(kept, "green"), soft_wrap=True)
    return 0


def _check_all(contract: Contract, console: Console) -> int:
    """Check and print every rule; return the number of broken rules."""
    num_broken = 0
    for rule in sorted(Contract.RULES):
        what = Contract.TITLES[rule]
        try:
            with console.status(what):
                contract.check(rule)
        except NoEpisodeEnd:
            raise
        except ContractViolation as error:
            num_broken += 1
            console.print(Text("broken  ", "bold red").append(f"{rule:2}  {what}", "default"), soft_wrap=True)
            console.print(Text(f"            {error}"), soft_wrap=True)
            continue
        is_partial = not contract.is_deterministic and rule in Contract.COMPARES
        mark = Text("skipped " if is_partial else "ok      ", "yellow" if is_partial else "green")
        console.print(mark.append(f"{rule:2}  {what}", "default"), soft_wrap=True)
    return num_broken
