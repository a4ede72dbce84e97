"""`--config FILE`: a YAML file whose entries are the defaults of a command's options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

#: Name in the file of `envherd size --yaml` -> option.
_SYNONYMS = {"num_envs": "envs", "num_workers": "workers"}
#: Entries that are not options of the command line; `settings` reads them.
_OTHERS = ("executor", "stepping", "options")
_META = "envherd.config"


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the entries of a file as the defaults of the options; the callback of `--config`."""
    if path is None:
        return None
    try:
        import yaml
    except ImportError:
        raise typer.BadParameter("expected the package pyyaml: pip install 'envherd[cli]'.") from None
    from envherd.workers.build import closest  # imported here, as numpy takes 0.1 s

    try:
        found = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"expected a YAML file, got {str(path)!r} ({error}).") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"expected names and values in {str(path)!r}, got {type(found).__name__}.")
    known = [str(one.name) for one in context.command.params]
    defaults: dict[str, Any] = {}
    for name, value in found.items():
        option = _SYNONYMS.get(name, str(name).replace("-", "_"))
        if option in _OTHERS:
            context.meta.setdefault(_META, {})[option] = value
        elif option in known:
            defaults[option] = json.dumps(value) if isinstance(value, dict) else value
        else:
            raise typer.BadParameter(f"{str(path)!r} has an unknown entry {name!r}.{closest(option, known)}")
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def settings(context: typer.Context) -> tuple[bool, dict[str, Any]]:
    """Return whether the file selects `SerialEnv`, and its `ExecutorOptions` by name.

    `--workers` on the command line selects worker processes. Commands ignore `stepping`, because they step all envs
    together.
    """
    entries = context.meta.get(_META, {})
    kind, options = entries.get("executor", "ParallelEnv"), entries.get("options") or {}
    if kind not in ("ParallelEnv", "SerialEnv"):
        raise typer.BadParameter(f"--config: expected executor ParallelEnv or SerialEnv, got {kind!r}.")
    if not isinstance(options, dict):
        raise typer.BadParameter(f"--config: expected options as names and values, got {options!r}.")
    source = context.get_parameter_source("workers")
    is_serial = kind == "SerialEnv" and (source is None or source.name != "COMMANDLINE")
    return is_serial, {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
