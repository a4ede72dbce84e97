"""Golden traces: hashes of the data of every family of envs, stepping mode and facade, kept in a file.

    python -m tools.golden                       # compare with the file; lists the cases that differ
    python -m tools.golden "cartpole/.*"         # only the cases whose name matches
    python -m tools.golden --write               # record the file again, after a wanted change of data
    python -m tools.golden --print cartpole/sent # every row of a case: two versions can be compared with diff

A case is `FAMILY/MODE`, for each of `SEEDS`. Its hash covers names, dtypes, shapes and bytes of `NUM_STEPS` steps of
`NUM_ENVS` envs. Actions depend on seed, env and step alone, so the rows of an env do not depend on which env was ready
first. There is one file for each set of versions of the libraries that determine the data (`VERSIONS`). Simulators with
floating-point numbers may differ between processors: compare files that one machine has written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envherd import (
    AsyncCollector,
    Binary,
    Box,
    Collector,
    Discrete,
    LeafSpec,
    MultiDiscrete,
    OneHot,
    ParallelEnv,
    SerialEnv,
)
from envherd.workers.testing import CountingEnv
from tests.contracts.families import FAMILIES, gymnasium_env
from tests.envs.counting_envs import AgentsEnv, FlagsEnv, TextEnv
from tests.extras import has_extra

NUM_ENVS, NUM_STEPS, SEEDS = 3, 200, (0, 1, 2)
VERSIONS = ("torchrl", "gymnasium")
FOLDER = Path(__file__).parents[1] / "tests" / "golden"
#: The families that are driven in every mode: one for each adapter, and for each kind of spec.
NAMES = (
    *(
        "gymnasium_cartpole",
        "gymnasium_nested",
        "gymnasium_taxi",
        "dm_control",
        "dmlab2d",
    ),
    *(
        "pettingzoo_spread",
        "pettingzoo_village",
        "torchrl",
        "meltingpot",
        "own",
        "vector_sync_same_step",
    ),
    "envpool_async",
)
_OWN = {
    "counting": CountingEnv,
    "pixels": functools.partial(CountingEnv, size=40, reuses_buffers=True),
    "agents": AgentsEnv,
    "text": TextEnv,
    "flags": FlagsEnv,
    "lengths": [functools.partial(CountingEnv, length) for length in (4, 7, 5)],
}


class Trace:
    """The hash of each env's rows.

    Args:
        prints: also print a line for each value.
    """

    def __init__(self, *, prints: bool = False) -> None:
        self._hashes: dict[int, Any] = {}
        self._prints = prints

    def add(self, value: Any, name: str = "", env_id: int = -1) -> None:
        """Add an array, or a nested collection of arrays; -1: not of one env."""
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                self.add(value[key], f"{name}.{key}", env_id)
        elif isinstance(value, (list, tuple)) and not all(
            isinstance(one, (int, float, str)) for one in value
        ):
            for i, one in enumerate(value):
                self.add(one, f"{name}.{i}", env_id)
        else:
            data = value.numpy() if isinstance(value, torch.Tensor) else value
            data = np.asarray(data)
            is_plain = data.dtype != object
            content = (
                np.ascontiguousarray(data).tobytes()
                if is_plain
                else repr(data.tolist()).encode()
            )
            head = f"{name} {data.dtype} {data.shape} ".encode()
            if self._prints:
                print(
                    env_id,
                    head.decode(),
                    hashlib.sha256(content).hexdigest()[:12],
                    np.array2string(data, threshold=8),
                )
            self._hashes.setdefault(env_id, hashlib.sha256()).update(head + content)

    def add_rows(self, td: TensorDictBase, ids: Any = None) -> None:
        """Add the rows of a batch `[k]`."""
        ids = range(td.shape[0]) if ids is None else ids
        for key in sorted(td.keys(include_nested=True, leaves_only=True), key=str):
            if key != "env_ids":
                values = td.get(key)
                values = (
                    values.numpy()
                    if isinstance(values, torch.Tensor)
                    else values.tolist()
                )
                for row, env_id in enumerate(ids):
                    self.add(values[row], str(key), int(env_id))

    def add_rollout(self, data: TensorDictBase) -> None:
        """Add a batch `[N, T]`, as `add_rows` would add its steps."""
        for step in range(data.shape[1]):
            self.add_rows(data[:, step])

    @property
    def digest(self) -> str:
        """The hash of all rows."""
        ends = [self._hashes[env_id].hexdigest() for env_id in sorted(self._hashes)]
        return hashlib.sha256("".join(ends).encode()).hexdigest()[:16]


# ---- the executor ----------------------------------------------------------------------------


class Run:
    """One executor, driven with one seed."""

    def __init__(self, env: Any, seed: int, trace: Trace) -> None:
        env.set_seed(seed)
        self.env, self.trace, self.rng = env, trace, np.random.default_rng(seed)
        self.counts = np.zeros(env.num_envs, int)
        self._plans = []
        for env_id, spec in enumerate(env.specs):
            rng = np.random.default_rng([seed, env_id])
            leaves = sorted((*spec.action, *spec.state), key=lambda leaf: leaf.key)
            self._plans.append({leaf.key: _draw(leaf, rng) for leaf in leaves})

    def act(self, td: Any) -> Any:
        """Set the next action of each env of a batch `[k]`."""
        ids = self.ids_of(td)
        for key in self._plans[0]:
            rows = [
                self._plans[env_id][key][self.counts[env_id] % NUM_STEPS]
                for env_id in ids
            ]
            td.set(key, torch.from_numpy(np.stack(rows)))
        self.counts[ids] += 1
        return td

    def ids_of(self, td: Any) -> Any:
        """Return the env ids of a batch `[k]`; each row of an env that is a batch has the id."""
        ids = td.get("env_ids", None)
        return (
            np.arange(td.shape[0])
            if ids is None
            else ids.numpy().reshape(td.shape[0], -1)[:, 0]
        )


def _draw(leaf: LeafSpec, rng: np.random.Generator) -> np.ndarray:
    """Return legal values `[NUM_STEPS, *shape]` of an action leaf."""
    domain, shape = leaf.domain, (NUM_STEPS, *leaf.shape)
    if isinstance(domain, Discrete):
        values: Any = rng.integers(0, domain.n, shape)
    elif isinstance(domain, MultiDiscrete):
        values = rng.integers(0, np.broadcast_to(domain.nvec, shape))
    elif isinstance(domain, Binary):
        values = rng.integers(0, 2, shape)
    elif isinstance(domain, OneHot):
        values = np.eye(domain.n)[rng.integers(0, domain.n, shape[:-1])]
    else:
        low, high = (domain.low, domain.high) if isinstance(domain, Box) else (-1, 1)
        values = rng.uniform(np.maximum(low, -1), np.minimum(high, 1), shape)
    return values.astype(leaf.dtype)


def fused(run: Run) -> None:
    """`step_and_maybe_reset`."""
    root = run.env.reset()
    for _ in range(NUM_STEPS):
        td, root = run.env.step_and_maybe_reset(run.act(root))
        run.trace.add_rows(td)
    run.trace.add_rows(root)


def stepped(run: Run) -> None:
    """`step`, and `reset` of the envs (or rows) that ended and of some others; actions by `rand_action`."""
    root = run.env.reset()
    for _ in range(NUM_STEPS):
        td = run.env.step(run.env.rand_action(root))
        run.trace.add_rows(td)
        done = td["next", "done"]
        mask = done | torch.from_numpy(run.rng.random(done.shape) < 0.02)
        root = run.env.reset(TensorDict({"_reset": mask}, run.env.batch_size))
    run.trace.add_rows(root)


def sent(run: Run) -> None:
    """`send` and `recv` of all envs."""
    root = run.env.reset()
    for _ in range(NUM_STEPS):
        run.env.send(run.act(root))
        run.trace.add_rows(run.env.recv())
        root = run.env.current()
    run.trace.add_rows(root)


def first(run: Run) -> None:
    """`send` and `recv` of the first one or two envs that are ready."""
    env, num_sent = run.env, run.env.num_envs
    env.send(run.act(env.reset()))
    while num_sent:
        td = env.recv(1, max_envs=min(2, num_sent))
        ids = run.ids_of(td)
        run.trace.add_rows(td, ids)
        going = ids[run.counts[ids] < NUM_STEPS]
        num_sent += len(going) - len(ids)
        if len(going):
            env.send(run.act(env.current(going)))
    run.trace.add_rows(env.current())


def rolled(run: Run) -> None:
    """Rollouts: one, one that continues it in the same memory, and one that ends with the first episode."""
    data = run.env.rollout(NUM_STEPS // 2, run.act, break_when_any_done=False)
    run.trace.add_rollout(data)
    data = run.env.rollout(
        NUM_STEPS // 2, run.act, auto_reset=False, break_when_any_done=False, out=data
    )
    run.trace.add_rollout(data)
    run.trace.add_rollout(run.env.rollout(50, run.act, break_when_any_done=True))


def recurrent(run: Run) -> None:
    """`Collector`, with a policy that carries a state from step to step."""

    def policy(td: Any) -> Any:
        return run.act(td).set(("next", "state"), td["state"] * 0.5 + 1)

    primer = TensorDict(
        {"state": torch.zeros(*run.env.batch_size, 2)}, run.env.batch_size
    )
    frames = {
        "frames_per_batch": 50 * run.env.num_envs,
        "total_frames": NUM_STEPS * run.env.num_envs,
    }
    with Collector(
        run.env, policy, primer=primer, close_env=False, **frames
    ) as collector:
        for data in collector:
            run.trace.add_rollout(data)


def gathered(run: Run) -> None:
    """`AsyncCollector`; the first `NUM_STEPS` steps of each env."""
    num_left, parts = NUM_STEPS * run.env.num_envs, list[TensorDictBase]()
    with AsyncCollector(
        run.env, run.act, frames_per_batch=10 * run.env.num_envs, close_env=False
    ) as collector:
        while num_left:
            rows = collector.collect().flatten(0, 1)
            is_early = _of_env(rows, "step") < NUM_STEPS
            parts.append(rows[is_early].exclude("policy_version"))
            num_left -= len(parts[-1])
    rows = TensorDict.cat(parts)
    # The rows of a batch are in the order in which they were completed.
    rows = rows[_of_env(rows, "step").argsort(stable=True)]
    run.trace.add_rows(rows, _of_env(rows, "env_ids"))


def _of_env(rows: TensorDictBase, name: str) -> torch.Tensor:
    """Return a number of each step, int64 `[k]`; an env that is a batch has it for each of its rows."""
    return rows[name].reshape(len(rows), -1)[:, 0]


MODES: dict[str, Callable[[Run], None]] = {
    one.__name__: one
    for one in (fused, stepped, sent, first, rolled, recurrent, gathered)
}


def _suits(mode: str, env: Any) -> bool:
    """Return whether `AsyncCollector` takes the envs, if it is the mode."""
    return mode != "gathered" or not any(leaf.is_side for leaf in env.spec.leaves())


# ---- the facades -----------------------------------------------------------------------------


def _needs_reset(env: Any) -> bool:
    return getattr(env.metadata["autoreset_mode"], "value", "") == "Disabled"


def _drive_gymnasium(env: Any, seed: int, trace: Trace) -> None:
    env.action_space.seed(seed)
    trace.add(env.reset(seed=seed))
    for _ in range(NUM_STEPS):
        result = env.step(env.action_space.sample())
        trace.add(result)
        ended = np.asarray(result[2]) | np.asarray(result[3])
        if _needs_reset(env) and ended.any():
            trace.add(env.reset(options={"reset_mask": ended}))


def _drive_sb3(env: Any, seed: int, trace: Trace) -> None:
    env.seed(seed)
    env.action_space.seed(seed)
    trace.add((env.reset(), env.reset_infos))
    for _ in range(NUM_STEPS):
        result = env.step(
            np.stack([env.action_space.sample() for _ in range(env.num_envs)])
        )
        trace.add((result, env.reset_infos))


def _drive_pettingzoo(env: Any, seed: int, trace: Trace) -> None:
    for agent in env.possible_agents:
        env.action_space(agent).seed(seed)
    trace.add(env.reset(seed=seed))
    for _ in range(NUM_STEPS):
        result = env.step(
            {agent: env.action_space(agent).sample() for agent in env.possible_agents}
        )
        trace.add((result, env.active))
        ended = ~np.stack([*env.active.values()], -1).any(-1)
        if _needs_reset(env) and ended.any():
            trace.add(env.reset(options={"reset_mask": ended}))


def _drive_torchrl(env: Any, seed: int, trace: Trace) -> None:
    env.set_seed(seed)
    torch.manual_seed(seed)
    trace.add_rollout(env.rollout(NUM_STEPS // 2, break_when_any_done=False))
    root = env.reset()
    for _ in range(NUM_STEPS // 2):
        td, root = env.step_and_maybe_reset(env.rand_action(root))
        trace.add_rows(td)
    trace.add_rows(root)


def _open_gymnasium(mode: str, makes: Any) -> Any:
    from envherd.gymnasium import AsyncVectorEnv

    return AsyncVectorEnv(makes, autoreset_mode=mode)


def _open_cleanrl(makes: Any) -> Any:
    from envherd.cleanrl import gym

    return gym.vector.SyncVectorEnv(makes)


def _open_sb3(makes: Any) -> Any:
    from envherd.sb3 import SubprocVecEnv

    return SubprocVecEnv(makes)


def _open_pettingzoo(mode: str, makes: Any) -> Any:
    from envherd.pettingzoo import ParallelVectorEnv

    return ParallelVectorEnv(makes, autoreset_mode=mode)


def _open_torchrl(name: str, makes: Any) -> Any:
    from envherd import torchrl

    cls = getattr(torchrl, name)
    return cls(len(makes), makes)


def _pettingzoo_torchrl() -> Any:
    from torchrl.envs import PettingZooWrapper

    return PettingZooWrapper(FAMILIES["pettingzoo_spread"].make_env())


def _dm_control_torchrl() -> Any:
    from torchrl.envs import DMControlEnv

    return DMControlEnv("cartpole", "swingup")


_CARTPOLE = functools.partial(gymnasium_env, "CartPole-v1", draws=False)
_NESTED = FAMILIES["gymnasium_nested"].make_env
#: Name -> extra, factory, a function that makes a facade of factories, and one that drives it.
FACADES: dict[
    str, tuple[str, Any, Callable[[Any], Any], Callable[[Any, int, Trace], None]]
] = {}
for _mode in ("NextStep", "SameStep", "Disabled"):
    _open: Any = functools.partial(_open_gymnasium, _mode)
    FACADES[f"cartpole/gymnasium {_mode}"] = (
        "gymnasium",
        _CARTPOLE,
        _open,
        _drive_gymnasium,
    )
    _open = functools.partial(_open_pettingzoo, _mode)
    FACADES[f"spread/pettingzoo {_mode}"] = (
        "pettingzoo",
        FAMILIES["pettingzoo_spread"].make_env,
        _open,
        _drive_pettingzoo,
    )
FACADES["nested/gymnasium NextStep"] = (
    "gymnasium",
    _NESTED,
    functools.partial(_open_gymnasium, "NextStep"),
    _drive_gymnasium,
)
FACADES["cartpole/cleanrl"] = ("gymnasium", _CARTPOLE, _open_cleanrl, _drive_gymnasium)
FACADES["cartpole/sb3 SubprocVecEnv"] = ("sb3", _CARTPOLE, _open_sb3, _drive_sb3)
for _name, _make, _drive in (
    ("ParallelEnv", FAMILIES["torchrl"].make_env, _drive_torchrl),
    ("SerialEnv", FAMILIES["torchrl"].make_env, _drive_torchrl),
    ("ParallelEnv of PettingZoo", _pettingzoo_torchrl, _drive_torchrl),
    ("ParallelEnv of dm_control", _dm_control_torchrl, _drive_torchrl),
):
    FACADES[f"torchrl/{_name}"] = (
        "torchrl",
        _make,
        functools.partial(_open_torchrl, _name.partition(" ")[0]),
        _drive,
    )


# ---- recording -------------------------------------------------------------------------------


def record(
    pattern: str = "", *, prints: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each case that matches, and its hash for each seed."""
    own: dict[str, tuple[str, Any]] = {
        name: ("gymnasium", make) for name, make in _OWN.items()
    }
    families = own | {
        name: (FAMILIES[name].extra, FAMILIES[name].make_env) for name in NAMES
    }
    for name, (extra, make) in families.items():
        cases = [f"{name}/{mode}" for mode in MODES] + [f"{name}/serial"]
        if not has_extra(extra) or not any(re.search(pattern, case) for case in cases):
            continue
        with ParallelEnv(NUM_ENVS, make, num_workers=2) as env:
            for mode in MODES:
                if re.search(pattern, f"{name}/{mode}") and _suits(mode, env):
                    yield (
                        f"{name}/{mode}",
                        [_drive_core(env, mode, seed, prints=prints) for seed in SEEDS],
                    )
        if re.search(pattern, f"{name}/serial"):
            with SerialEnv(NUM_ENVS, make) as env:
                yield (
                    f"{name}/serial",
                    [_drive_core(env, "fused", seed, prints=prints) for seed in SEEDS],
                )
    for name, (extra, make, open_env, drive) in FACADES.items():
        if has_extra(extra) and re.search(pattern, name):
            with contextlib.closing(open_env([make] * NUM_ENVS)) as env:
                digests = []
                for seed in SEEDS:
                    drive(env, seed, trace := Trace(prints=prints))
                    digests.append(trace.digest)
                yield name, digests


def _drive_core(env: Any, mode: str, seed: int, *, prints: bool) -> str:
    MODES[mode](Run(env, seed, trace := Trace(prints=prints)))
    return trace.digest


def golden_file() -> Path:
    """Return the file for the versions that are installed."""
    versions = (f"{name}-{importlib.metadata.version(name)}" for name in VERSIONS)
    return FOLDER / f"{'_'.join(versions)}.json"


def main() -> int:
    """Compare or write; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Compare the data of all envs and modes with a file of hashes."
    )
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="regular expression for the names of cases",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the hashes of these cases"
    )
    parser.add_argument(
        "--print", action="store_true", dest="prints", help="print every value instead"
    )
    args = parser.parse_args()
    path = golden_file()
    kept = json.loads(path.read_text()) if path.exists() else {}
    differing, count, began = [], 0, time.perf_counter()
    with warnings.catch_warnings(action="ignore"):  # of the envs
        for name, digests in record(args.pattern, prints=args.prints):
            count += 1
            took, began = time.perf_counter() - began, time.perf_counter()
            print(f"{name}: {took:.1f} s", file=sys.stderr)
            if args.write:
                kept[name] = digests
            elif kept.get(name) != digests and not args.prints:
                differing.append(name)
                print(f"{name}: expected {kept.get(name)}, got {digests}", flush=True)
    if args.write:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n")
    print(f"{count} cases, {len(differing)} differ from {path.name}", file=sys.stderr)
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
