"""The command line: `envherd COMMAND`. One file per command; `envherd --help` lists them.

Exit codes: 0 success, 1 failure of the command, 2 wrong usage, 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import sys

from envherd.executor.cli.exit_codes import EXIT_INTERRUPTED


def main() -> None:
    """Run the command that `sys.argv` names; the console script `envherd`."""
    try:
        from envherd.executor.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"envherd failed: expected the package {error.name}, got none. pip install 'envherd[cli]'")
    try:
        app()
    except KeyboardInterrupt:
        # The command did not handle it: Ctrl-C came during its start, or a second one came during its end.
        sys.exit(EXIT_INTERRUPTED)
