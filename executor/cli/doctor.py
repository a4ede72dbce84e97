"""`envherd doctor`: checks the machine and the installation, and suggests fixes."""

from typing import Annotated, Any

import typer

from envherd.executor.cli.options import EXIT_FAILED, Json, write_json


def doctor(
    *,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ENV",
            help="Also build this env, and show whether C steps it.",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Check Python, packages, Melting Pot, start methods, shared memory, limits, GPU, and leftovers of crashed runs.

    The exit code is 1 if anything fails, 0 otherwise; warnings do not count.
    """
    if env is None:
        raise typer.Exit(_report("", None, json))
    # Imported here: they need packages that may be missing.
    from envherd.executor.cli.commands import carry_out
    from envherd.workers.adapters.env_names import factory_for

    raise typer.Exit(
        carry_out(
            lambda: factory_for(env),
            lambda make_env: _report(env, make_env, json),
        )
    )


def _report(env: str, make_env: Any, path: str | None) -> int:
    """Print all findings; return the exit code."""
    from rich.console import Console
    from rich.text import Text

    from envherd.executor.doctor import Finding, examine

    console = Console(stderr=path == "-")
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    findings: list[Finding] = []
    for finding in examine(env, make_env):
        findings.append(finding)
        console.print(
            Text(f"{finding.level:>4}  ", styles[finding.level])
            .append(f"{finding.name}: ", "bold")
            .append(finding.found, "default"),
            soft_wrap=True,
        )
        if finding.fix and finding.level != "ok":
            console.print(Text(f"      fix: {finding.fix}", "cyan"), soft_wrap=True)
    has_failed = any(finding.level == "fail" for finding in findings)
    write_json(
        path,
        {
            "schema": "envherd.doctor/1",
            "is_ok": not has_failed,
            "findings": [vars(one) for one in findings],
        },
    )
    return EXIT_FAILED if has_failed else 0
