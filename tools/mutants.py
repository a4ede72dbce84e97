"""Change one place of the source at a time and see whether a test fails: `make mutants` (docs/contributing.md).

Guarantees: the working tree is never written to; each change is made in a copy. A change that makes the tests hang
ends at a time limit, with every process that its tests started. The same seed and the same source give the same sample.
Assumes: Linux (a process that adopts orphans, /proc).

Neither mutmut nor cosmic-ray deletes statements, which is the best way to find untested code.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PARTS = ("shm", "workers", "executor")
_PR_SET_CHILD_SUBREAPER = 36

_STEPS = ("executor/protocol/test_stepping.py", "executor/protocol/test_exchange.py")
_LOSSES = (
    "faults/test_env_raises.py",
    "executor/protocol/test_losses.py",
    "faults/test_matrix.py",
    "faults/test_executor_model.py",
)
#: File -> the test files that should notice a change of it, the likeliest first.
TESTS = {
    "executor/protocol/engine.py": (*_STEPS, *_LOSSES),
    "executor/protocol/exchange.py": (
        "executor/protocol/test_exchange.py",
        *_LOSSES,
        "executor/protocol/test_infos.py",
        "executor/protocol/test_side_actions.py",
    ),
    "executor/pools/worker_pool.py": (*_STEPS, *_LOSSES),
    "executor/pools/commands.py": (
        "executor/pools/test_command_words.py",
        "executor/pools/test_fast_commands.py",
        *_STEPS,
        "executor/protocol/test_fast_calls.py",
        *_LOSSES,
    ),
    "executor/start/waiting.py": _LOSSES,
    "executor/protocol/fast.py": (
        "executor/protocol/test_fast_calls.py",
        "executor/protocol/test_exchange.py",
        "executor/protocol/test_stepping.py",
        "executor/rollouts/test_rollout.py",
        "faults/test_interrupts.py",
    ),
    "executor/protocol/positions.py": (
        *_STEPS,
        *_LOSSES,
        "executor/rollouts/test_rollout.py",
    ),
    "executor/protocol/env_batches.py": (*_STEPS, "executor/rollouts/test_rollout.py"),
    "executor/protocol/info_reader.py": (
        "executor/protocol/test_infos.py",
        "executor/protocol/test_side_actions.py",
    ),
    "executor/rollouts/rollout.py": (
        "executor/rollouts/test_rollout.py",
        "executor/collectors/test_collector.py",
        *_LOSSES,
    ),
    "executor/protocol/env_states.py": ("faults/test_env_model.py", *_STEPS, *_LOSSES),
    "executor/protocol/flight.py": (
        *_STEPS,
        *_LOSSES,
        "executor/rollouts/test_rollout.py",
        "executor/facades/test_gymnasium_equality.py",
        "executor/facades/test_gymnasium_errors.py",
    ),
    "executor/protocol/losses.py": (*_LOSSES, "executor/protocol/test_exchange.py"),
    "executor/processes/supervisor.py": (
        *_LOSSES,
        "executor/protocol/test_recycling.py",
    ),
    "executor/batches/actions.py": (
        "executor/batches/test_intake.py",
        "executor/batches/test_sampling.py",
        "executor/batches/test_legality.py",
        "executor/protocol/test_stepping.py",
    ),
    "executor/batches/hand_out.py": (
        "executor/batches",
        "executor/protocol/test_stepping.py",
        "executor/protocol/test_fast_calls.py",
    ),
    "workers/block/block.py": (
        "workers/test_protocol.py",
        "executor/protocol/test_stepping.py",
        "executor/rollouts/test_rollout.py",
        "faults/test_env_raises.py",
        "workers/test_gymnasium_vector.py",
        "executor/protocol/test_lifetime.py",
    ),
    "workers/process/loop.py": (
        "workers/test_loop.py",
        "workers/test_native_loop.py",
        *_STEPS,
        "executor/monitor/test_watching.py",
    ),
    "workers/block/slot.py": (
        "workers/test_slot.py",
        "workers/test_slot_states.py",
        "workers/test_native.py",
        "executor/protocol/test_infos.py",
        *_STEPS,
    ),
    "shm/sync.py": (
        "shm/test_sync.py",
        "shm/test_tally.py",
        "shm/test_tally_model.py",
        "executor/protocol/test_exchange.py",
    ),
}

_FACADES = "executor/facades"
_CONTRACT = ("contracts/test_oracles.py", "contracts/test_violations.py")
#: Folder or file that TESTS does not name -> the tests that should notice a change below it; the longest that fits.
BELOW: dict[str, tuple[str, ...]] = {
    "executor/": (
        "executor/test_options.py",
        "executor/test_first_mistakes.py",
        *_STEPS,
    ),
    "executor/guests/collectors/async_collector.py": (
        "executor/collectors/test_async_collector.py",
    ),
    "executor/batches/": ("executor/batches", *_STEPS),
    "executor/cli/": ("executor/cli", "executor/show/test_per_player.py"),
    "executor/cluster/": ("cluster",),
    "executor/guests/collectors/collector.py": (
        "executor/collectors/test_collector.py",
    ),
    "executor/doctor.py": ("executor/test_doctor.py",),
    "executor/__init__.py": ("test_exports.py", "test_imports.py"),
    "executor/guests/collectors/": ("executor/collectors",),
    "executor/keywords.py": (
        "executor/batches/test_arguments.py",
        "executor/test_first_mistakes.py",
        "test_exports.py",
    ),
    "executor/processes/": (
        "executor/pools/test_lifecycle.py",
        "executor/pools/test_shared_helpers.py",
        "executor/pools/test_placement.py",
        *_LOSSES,
    ),
    "executor/progress.py": ("executor/cli",),
    "executor/sending/": (
        "executor/pools/test_factories.py",
        "executor/pools/test_what_workers_have.py",
        *_STEPS,
    ),
    "executor/start/": (
        "executor/pools/test_shared_helpers.py",
        "executor/pools/test_lifecycle.py",
        "executor/pools/test_preloading.py",
        "executor/pools/test_where_envs_run.py",
    ),
    f"{_FACADES}/": (f"{_FACADES}/test_faults.py", _FACADES),
    f"{_FACADES}/cleanrl/": (f"{_FACADES}/test_cleanrl.py",),
    f"{_FACADES}/gymnasium/": (
        f"{_FACADES}/test_gymnasium_equality.py",
        f"{_FACADES}/test_gymnasium_errors.py",
        f"{_FACADES}/test_faults.py",
    ),
    f"{_FACADES}/pettingzoo/": (
        f"{_FACADES}/test_pettingzoo_vector_env.py",
        f"{_FACADES}/test_faults.py",
    ),
    f"{_FACADES}/sb3/": (
        f"{_FACADES}/test_sb3_vec_env.py",
        f"{_FACADES}/test_sb3_equality.py",
        f"{_FACADES}/test_sb3_training.py",
        f"{_FACADES}/test_faults.py",
    ),
    f"{_FACADES}/torchrl/": (
        f"{_FACADES}/test_torchrl_use.py",
        f"{_FACADES}/test_torchrl_parallel.py",
        f"{_FACADES}/test_torchrl_fast.py",
    ),
    f"{_FACADES}/torchrl/ways/": ("workers/test_torchrl_direct.py",),
    "executor/guests/branching.py": (
        "executor/protocol/test_branch.py",
        "executor/protocol/test_branch_families.py",
    ),
    "executor/guests/interpreters.py": ("executor/pools/test_interpreters.py",),
    "executor/guests/leases.py": ("executor/leases",),
    "executor/guests/monitor.py": ("executor/monitor",),
    "executor/guests/portable.py": ("executor/pools/test_portable.py",),
    "executor/guests/recycling.py": ("executor/protocol/test_recycling.py",),
    "executor/guests/saving.py": ("executor/protocol/test_saving.py",),
    "executor/guests/simulator/": (
        "executor/simulator",
        "workers/test_torch_native.py",
    ),
    "executor/machine/": ("executor/machine",),
    "executor/pools/": ("executor/pools", *_STEPS, *_LOSSES),
    "executor/protocol/": ("executor/protocol", *_LOSSES),
    "executor/rollouts/": ("executor/rollouts", "executor/collectors"),
    "executor/rollouts/policy_state.py": (
        "executor/rollouts",
        "executor/protocol/test_exchange.py",
    ),
    "executor/show/": ("executor/show", "executor/cli/test_cli_figures.py"),
    "executor/sizing/": ("executor/sizing",),
    "executor/testing/": _CONTRACT,
    "executor/testing/together.py": ("workers/test_together.py", *_CONTRACT),
    "shm/": ("shm", *_STEPS),
    "workers/": ("workers", *_STEPS),
    "workers/adapters/": (
        "workers/test_refusals.py",
        "workers/test_checks.py",
        "contracts/test_families.py",
    ),
    "workers/adapters/dm_env/": (
        "workers/test_dm_env_adapter.py",
        "workers/test_refusals.py",
    ),
    "workers/adapters/envpool.py": (
        "workers/test_envpool.py",
        "workers/test_refusals.py",
    ),
    "workers/adapters/gymnasium/": (
        "workers/test_gymnasium_adapter.py",
        "workers/test_gymnasium_spaces.py",
        "workers/test_gymnasium_vector.py",
        "workers/test_refusals.py",
    ),
    "workers/adapters/meltingpot/": (
        "workers/test_meltingpot.py",
        "workers/test_meltingpot_factory.py",
        "workers/test_meltingpot_deterministic.py",
    ),
    "workers/adapters/pettingzoo/": (
        "workers/test_pettingzoo_adapter.py",
        "workers/test_refusals.py",
    ),
    "workers/adapters/simulators/": (
        "workers/test_isaaclab.py",
        "workers/test_torch_native.py",
    ),
    "workers/adapters/torch_native.py": (
        "workers/test_torch_native.py",
        "executor/simulator",
    ),
    "workers/adapters/torchrl/": (
        "workers/test_torchrl_adapter.py",
        "workers/test_torchrl_protocol.py",
    ),
}


def tests_of(path: str) -> tuple[str, ...]:
    """Return the tests of a file, the likeliest to notice a change first; none for a file that has no entry."""
    fitting = [entry for entry in BELOW if path.startswith(entry)]
    return TESTS.get(path) or (BELOW[max(fitting, key=len)] if fitting else ())


def all_files() -> list[str]:
    """Return the files of the source that have tests here, in the order of their names."""
    found = (
        str(file.relative_to(ROOT))
        for part in PARTS
        for file in (ROOT / part).rglob("*.py")
    )
    return sorted(filter(tests_of, found))


_COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_COMPUTED = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes from `start` to `end` of a file become `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Return the file with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Return the change as a diff."""
        old, new = (text.decode().splitlines() for text in (source, self.apply(source)))
        return "\n".join(
            difflib.unified_diff(old, new, self.path, self.path, lineterm="", n=2)
        )


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return all possible changes of a file, in the order of its lines."""
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    found: dict[tuple[int, int, str], Mutant] = {}
    for node, text in _changes(ast.parse(source)):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        found[start, end, text] = Mutant(path, node.lineno, start, end, text)
    return sorted(
        found.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.text)
    )


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes in functions, and the text that may stand there instead."""
    for function in (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ):
        for statement in function.body:
            for node in _code_under(statement):
                if function.name == "__init__" and isinstance(
                    node, ast.Assign | ast.AnnAssign
                ):
                    continue  # an attribute that is missing is always found
                if (
                    isinstance(node, ast.Raise)
                    and (message := _message_of(node)) is not None
                ):
                    yield message, '""'
                yield from ((node, text) for text in _texts_for(node))
                if isinstance(node, ast.If | ast.While | ast.IfExp) and not any(
                    _texts_for(node.test)
                ):
                    yield node.test, f"not {_in_brackets(node.test)}"


def _message_of(node: ast.Raise) -> ast.expr | None:
    """Return the text of an error that is raised, if it is written there."""
    arguments = node.exc.args if isinstance(node.exc, ast.Call) else []
    texts = [
        part for part in arguments if isinstance(part, ast.JoinedStr | ast.Constant)
    ]
    return texts[0] if texts else None


def _code_under(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield statements and expressions, except those used only for messages or annotations."""
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.FunctionDef | ast.ClassDef):
        return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name != "annotation":
                yield from _code_under(child)


def _texts_for(node: ast.expr | ast.stmt) -> Iterator[str]:
    return _for_expression(node) if isinstance(node, ast.expr) else _for_statement(node)


def _for_statement(node: ast.stmt) -> Iterator[str]:
    match node:
        case (
            ast.Expr(value=ast.Call())
            | ast.AugAssign()
            | ast.Raise()
            | ast.Delete()
            | ast.Break()
            | ast.Continue()
        ):
            yield "pass"
        case ast.Assign(targets=[*targets]) if not any(
            isinstance(t, ast.Name | ast.Tuple) for t in targets
        ):
            yield "pass"
        case ast.Return(value=None):
            yield "pass"


def _for_expression(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.BoolOp(op=op, values=values):
            for left_out in values:
                kept = [
                    _in_brackets(value) for value in values if value is not left_out
                ]
                yield f"({(' and ' if isinstance(op, ast.And) else ' or ').join(kept)})"
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield _in_brackets(operand)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _COMPARED
        ):
            yield f"{_in_brackets(left)} {_COMPARED[type(op)]} {_in_brackets(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _COMPUTED:
            yield f"({_in_brackets(left)} {_COMPUTED[type(op)]} {_in_brackets(right)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() as value):
            yield str(value + 1)
        case ast.Call(
            func=ast.Attribute(value=value, attr="copy"), args=[], keywords=[]
        ):
            yield _in_brackets(value)
        case ast.Call(
            func=(ast.Name(id=name) | ast.Attribute(attr=name)) as called
        ) if name in _SWAPPED:
            text = ast.unparse(called)
            yield (
                text.removesuffix(name)
                + _SWAPPED[name]
                + ast.unparse(node).removeprefix(text)
            )


def _in_brackets(node: ast.expr) -> str:
    text = ast.unparse(node)
    return (
        text
        if isinstance(
            node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript
        )
        else f"({text})"
    )


# ---- a copy of the tree, and tests in it ---------------------------------------------------------


def copy_tree(folder: Path) -> None:
    """Copy the working tree to a folder, from which `envherd` is imported."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():  # the links of `envherd/` too, which stay links
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    # Built, so git ignores it; without it no call is plain.
    for library in ROOT.glob("*/native/*.so"):
        shutil.copy(library, folder / library.relative_to(ROOT))


def run_tests(folder: Path, path: str, limit_s: float | None) -> tuple[str, float]:
    """Run the tests of a file until one fails; return "passed", or what failed, and the seconds it took."""
    tests = [f"tests/{name}" for name in tests_of(path)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=30",
    ]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "",
            # All cases of sampled tests: some mutants are killed by one of them.
            "ENVHERD_UNSAMPLED": "1",
        }
        process = subprocess.Popen(
            [*command, *tests],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
        is_late = process.poll() is None
        _end_all()
        process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    took = time.monotonic() - began
    if is_late:
        return f"the tests took longer than {limit_s:.0f} s", took
    if process.returncode == 0:
        return "passed", took
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or lines[-1:] or [f"exit code {process.returncode}"])[0], took


def _end_all() -> None:
    """Kill all descendants of this process, including adopted ones."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        for child in psutil.Process().children():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)


# ---- one after the other, some at a time ---------------------------------------------------------

_folder: Path


def _make_ready(parent: str) -> None:
    """Give this process a tree to change, and make it adopt the orphans of its tests."""
    global _folder  # noqa: PLW0603  # one for each process
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _folder = Path(tempfile.mkdtemp(dir=parent))
    copy_tree(_folder)


def _try_original(path: str) -> tuple[str, float]:
    return run_tests(_folder, path, None)


def _try_mutant(mutant: Mutant, limit_s: float) -> tuple[str, float]:
    source = (_folder / mutant.path).read_bytes()
    _write(_folder / mutant.path, mutant.apply(source))
    try:
        return run_tests(_folder, mutant.path, limit_s)
    finally:
        _write(_folder / mutant.path, source)


def _write(file: Path, source: bytes) -> None:
    """Write a file, and remove its bytecode: a second is as fine as python compares their times."""
    file.write_bytes(source)
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()


def sample(where: str, size: int, seed: int) -> list[Mutant]:
    """Return some changes of a file, or all of one line (`file:line`)."""
    path, _, line = where.partition(":")
    mutants = mutants_of(path, (ROOT / path).read_bytes())
    if line:
        return [mutant for mutant in mutants if mutant.line == int(line)]
    chosen = random.Random(f"{seed} {path}").sample(mutants, min(size, len(mutants)))
    return sorted(chosen, key=mutants.index)


def sample_of_all(size: int, seed: int, part: str) -> dict[str, list[Mutant]]:
    """Return a fixed number of changes of the whole source, by file; files with more places have more of them.

    Args:
        size: of the whole sample.
        seed: of the sample.
        part: "K/N" for each N-th change of it, from the K-th on.
    """
    first, _, step = part.partition("/")
    mutants = [
        mutant
        for path in all_files()
        for mutant in mutants_of(path, (ROOT / path).read_bytes())
    ]
    chosen = random.Random(seed).sample(range(len(mutants)), min(size, len(mutants)))
    found: dict[str, list[Mutant]] = {}
    for number in sorted(chosen)[int(first) - 1 :: int(step)]:
        found.setdefault(mutants[number].path, []).append(mutants[number])
    return found


def main() -> int:
    """Try mutants, print each and the survivors' diffs; return 1 if the tests fail without any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "files", nargs="*", metavar="FILE[:LINE]", help="default: the core (TESTS)"
    )
    parser.add_argument("--sample", type=int, default=10, help="mutants of each file")
    parser.add_argument(
        "--total",
        type=int,
        help="instead: mutants of the whole source, satellites included",
    )
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="K/N",
        help="of --total: each N-th change, from the K-th on",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="end the tests of a change after this time, and do not run those of the original first",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    options = parser.parse_args()
    chosen = {
        where: sample(where, options.sample, options.seed)
        for where in options.files or TESTS
    }
    if options.total:
        chosen = sample_of_all(options.total, options.seed, options.part)
    with (
        tempfile.TemporaryDirectory(prefix="envherd-mutants-") as parent,
        ProcessPoolExecutor(
            options.jobs, initializer=_make_ready, initargs=(parent,)
        ) as pool,
    ):
        return _try_all(pool, chosen, options.limit)


def _try_all(
    pool: ProcessPoolExecutor,
    chosen: dict[str, list[Mutant]],
    limit_s: float | None,
) -> int:
    paths = {where: where.partition(":")[0] for where in chosen}
    # They may be edited later.
    sources = {path: (ROOT / path).read_bytes() for path in paths.values()}
    limits = dict.fromkeys(chosen, limit_s or 0.0)
    originals = pool.map(_try_original, [] if limit_s else paths.values())
    for where, (outcome, took) in zip(chosen, originals, strict=False):
        print(
            f"{where}: {len(chosen[where])} mutants; tests of the original: {outcome} in {took:.0f} s",
            flush=True,
        )
        if outcome != "passed":
            return 1
        limits[where] = 30 + 1.5 * took
    tried = [
        (mutant, pool.submit(_try_mutant, mutant, limits[where]))
        for where in chosen
        for mutant in chosen[where]
    ]
    survivors: list[Mutant] = []
    for mutant, future in tried:
        outcome, took = future.result()
        verdict = "SURVIVED" if outcome == "passed" else "killed"
        print(
            f"{mutant.path}:{mutant.line} {verdict} after {took:.0f} s: {mutant.text!r} {outcome}",
            flush=True,
        )
        if outcome == "passed":
            survivors.append(mutant)
            print(mutant.diff(sources[mutant.path]), flush=True)
    for where, mutants in chosen.items():
        print(
            f"{where}: {sum(mutant not in survivors for mutant in mutants)} of {len(mutants)} killed"
        )
    print(f"all: {len(tried) - len(survivors)} of {len(tried)} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
