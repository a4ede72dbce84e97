"""`envherd check ENV`: checks each rule of the partial-reset contract on an env."""

from __future__ import annotations

import functools

from rich.console import Console
from rich.text import Text

from envherd.executor.cli.commands import carry_out
from envherd.executor.cli.exit_codes import EXIT_FAILED
from envherd.executor.cli.options import Check
from envherd.executor.testing.compare import ContractViolation
from envherd.executor.testing.contract import Contract, NoEpisodeEnd
from envherd.workers.adapters.env_names import factory_for


def run(options: Check) -> int:
    """Check every rule and print a line for each; return the exit code."""
    return carry_out(
        lambda: factory_for(options.env),
        lambda factory: _check(
            options.env,
            Contract(
                functools.partial(factory, **options.env_kwargs or {}),
                num_steps=options.steps,
                is_deterministic=not options.random,
                together=options.together,
            ),
        ),
    )


def _check(env: str, contract: Contract) -> int:
    """Check and print every rule; return the exit code."""
    console, num_broken = Console(), 0
    for rule in sorted(contract.rules):
        what = f"{rule:2}  {contract.TITLES[rule]}"
        try:
            with console.status(what):
                contract.check(rule)
        except NoEpisodeEnd as error:
            console.print(Text("error: ", "bold red").append(str(error), "default"), soft_wrap=True)
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
        broken = f"{env} breaks {num_broken} of {len(contract.rules)} rules."
        console.print(Text(broken, "bold red"), soft_wrap=True)
        return EXIT_FAILED
    proof = f"{contract.num_steps} steps of 2 envs, {contract.num_ends} ends of episodes."
    console.print(Text(f"{env} keeps the contract: {proof}", "green"), soft_wrap=True)
    return 0
