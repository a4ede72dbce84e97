"""`envherd check ENV`: checks each rule of the partial-reset contract on an env."""

import functools
from typing import Any

from rich.console import Console
from rich.text import Text

from envherd.executor.cli.commands import carry_out
from envherd.executor.cli.options import EXIT_FAILED, Check, write_json
from envherd.executor.machine.machine import require_room
from envherd.executor.testing.contract import Contract, NoEpisodeEnd
from envherd.executor.testing.traces import ContractViolation
from envherd.workers.adapters.env_names import factory_for

SCHEMA = "envherd.check/1"


def run(options: Check) -> int:
    """Check every rule and print a line for each; return the exit code."""
    return carry_out(
        lambda: _prepare(options),
        lambda contract: _check(options, contract),
    )


def _prepare(options: Check) -> Contract:
    """Check the options before an env is built; return the contract."""
    require_room(options.together, options.together)
    return Contract(
        functools.partial(factory_for(options.env), **options.env_kwargs or {}),
        num_steps=options.steps,
        is_deterministic=not options.random,
        together=options.together,
    )


def _check(options: Check, contract: Contract) -> int:
    """Check and report every rule; return the exit code."""
    rules = list[dict[str, Any]]()
    code = _check_rules(
        options.env,
        contract,
        Console(stderr=options.json == "-"),
        rules,
    )
    write_json(
        options.json,
        {
            "schema": SCHEMA,
            "env": options.env,
            "is_ok": code == 0,
            "num_steps": contract.num_steps,
            "rules": rules,
        },
    )
    return code


def _check_rules(
    env: str,
    contract: Contract,
    console: Console,
    rules: list[dict[str, Any]],
) -> int:
    """Check and print every rule, and add it to `rules`; return the exit code."""
    num_broken = 0

    def note(rule: int, result: str, found: str = "") -> None:
        rules.append(
            {
                "rule": rule,
                "title": contract.TITLES[rule],
                "result": result,
                "found": found,
            }
        )

    for rule in sorted(contract.rules):
        what = f"{rule:2}  {contract.TITLES[rule]}"
        try:
            with console.status(what):
                contract.check(rule)
        except NoEpisodeEnd as error:
            # Without an end of an episode, no other rule can be checked either.
            note(rule, "unknown", str(error))
            console.print(
                Text("error: ", "bold red").append(str(error), "default"),
                soft_wrap=True,
            )
            return EXIT_FAILED
        except ContractViolation as error:
            num_broken += 1
            note(rule, "broken", str(error))
            console.print(
                Text("broken  ", "bold red").append(what, "default"),
                soft_wrap=True,
            )
            console.print(Text(f"            {error}"), soft_wrap=True)
            continue
        is_partial = not contract.is_deterministic and rule in contract.COMPARES
        note(rule, "skipped" if is_partial else "ok")
        mark = Text("skipped ", "yellow") if is_partial else Text("ok      ", "green")
        console.print(mark.append(what, "default"), soft_wrap=True)
    if num_broken:
        console.print(
            Text(
                f"{env} breaks {num_broken} of {len(contract.rules)} rules.",
                "bold red",
            ),
            soft_wrap=True,
        )
        return EXIT_FAILED
    console.print(
        Text(
            f"{env} keeps the contract: {contract.num_steps} steps of 2 envs, {contract.num_ends} ends of episodes.",
            "green",
        ),
        soft_wrap=True,
    )
    return 0
