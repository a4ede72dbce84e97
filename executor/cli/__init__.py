"""The command line: `envherd COMMAND`. One file per command, the short ones in `app.py`; `envherd --help` lists them.

Exit codes: 0 success, 1 failure of the command, 2 wrong usage, 130 interrupted (Ctrl-C).
"""

import io
import os
import sys

from envherd.shm.platforms import open_standard_descriptors


def main() -> None:
    """Run the command that `sys.argv` names; the console script `envherd`."""
    open_standard_descriptors()
    # Its encoding may lack characters of tables and paths.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from envherd.executor.cli import app, options
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(
            f"envherd failed: expected the package {error.name}, got none. pip install 'envherd[cli]'"
        )
    arguments = sys.argv[1:]
    # Modules of envs that read the command line when they are imported must not see this one.
    del sys.argv[1:]
    try:
        app.app(arguments)
    except KeyboardInterrupt:
        # The command did not handle it: Ctrl-C came during its start, or a second one came during its end.
        sys.exit(options.EXIT_INTERRUPTED)
    except OSError as error:  # of the command's output, most often
        _report(error)
        sys.exit(options.EXIT_FAILED)
    finally:
        _write_out()


def _write_out() -> None:
    """Write what was printed. If that fails, drop it: Python would fail again at exit, with a traceback.

    Raises:
        SystemExit: it failed in a command that had succeeded.
    """
    ended = sys.exception()
    has_failed = not isinstance(ended, SystemExit) or ended.code not in (0, None)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not has_failed:
                from envherd.executor.cli.options import EXIT_FAILED

                _report(error)
                sys.exit(EXIT_FAILED)


def _report(error: OSError) -> None:
    """Print an error in one line; nothing if the reader of the output has ended (`| head`)."""
    if not isinstance(error, BrokenPipeError) and sys.stderr is not None:
        where = "" if error.filename is None else f"accessing {error.filename} failed: "
        sys.stderr.write(f"error: {where}{error.strerror or error}.\n")
