"""Crash capsules: what is in the journal and in the file, and what `envherd replay` makes of it."""

import dataclasses
import functools
import io
import json
import logging
import pickle
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

from tests.envs import faulty_envs, torch_simulators
from tests.extras import needs, skip_without

skip_without("cli", "gymnasium")

import gymnasium
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from envherd import (
    Capsules,
    EnvError,
    ExecutorOptions,
    ParallelEnv,
    SerialEnv,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.cli.app import app
from envherd.executor.guests.capsules import (
    _FIELDS,
    Capsule,
    CapsuleError,
    load_capsule,
)
from envherd.workers.adapters.named import FAMILIES, NamedFactory, reference_of
from envherd.workers.block.slot import KEPT_FLAGS, Journal, JournalFlag
from envherd.workers.seeding import episode_seed
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import BROKEN, FaultyEnv
from tests.envs.disturbing_envs import NanEnv
from tests.envs.logged_env import Logged
from tests.executor.calls import TWO_WORKERS
from tests.executor.drives import DRIVES, act

FAULTY = "python:tests.envs.breaking_envs:FaultyEnv"
HERE = "tests.executor.pools.test_capsules"


def journal_of(env, env_id=0):
    group_index, row = env._pool.slab.plan.place(env_id)
    group = env._pool.slab.groups[group_index]
    return Journal(group.journal, group.inputs, row)


def journaled(env, env_id):
    journal = journal_of(env, env_id)
    steps = int(journal.facts[0])
    return [
        b"".join(rows[step % journal.num_rows].tobytes() for rows in journal.rows)
        for step in range(steps)
    ]


def random_steps(env, num_steps):
    root = env.reset()
    for _ in range(num_steps):
        _, root = env.step_and_maybe_reset(env.rand_action(root))


def rebuilt(num_envs, factory, *, env_kwargs, **named):
    env = TWO_WORKERS(
        num_envs,
        factory,
        env_kwargs=env_kwargs if isinstance(env_kwargs, dict) else None,
        **named,
    )
    env.rebuild(env_kwargs=env_kwargs)
    return env


WAYS = {
    "serial": (SerialEnv, {}),
    "parallel": (TWO_WORKERS, {}),
    "in python": (TWO_WORKERS, {"check_finite": True}),
    "threads": (functools.partial(ParallelEnv, num_workers=1), {"env_threads": True}),
    "infos": (TWO_WORKERS, {"infos": "plain"}),
    "leaves": (TWO_WORKERS, {"infos": {"level": int}}),
    "portable": (TWO_WORKERS, {"start_method": "portable"}),
    "rebuilt": (rebuilt, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_stepping_journals_what_the_env_got(tmp_path, way):
    make, options = WAYS[way]
    for kind in ("index", "box", "dict"):
        with make(
            3,
            Logged,
            env_kwargs={"kind": kind},
            seed=4,
            options=_options(tmp_path, **options),
        ) as env:
            drives = [*DRIVES, random_steps] if kind == "index" else [random_steps]
            for drive in drives:
                drive(env, 8)  # an episode, and three steps of the next
                assert [journaled(env, env_id) for env_id in range(3)] == env.call(
                    "logged"
                )
                assert any(journaled(env, env_id) for env_id in range(3))
            assert journal_of(env).facts[KEPT_FLAGS] & JournalFlag.CHANGED  # by `call`
            env.reset()
            seed = episode_seed(4, 2, int(env._pool.slab.words["episode"][2]) - 1)
            assert journal_of(env, 2).facts.tolist()[::2] == [0, seed]
            assert not journal_of(env).facts[KEPT_FLAGS] & JournalFlag.CHANGED


def _options(folder, **options):
    return ExecutorOptions(capsules=folder / "crashes", **options)


def test_slab_has_no_journal_without_capsules():
    with SerialEnv(2, CountingEnv) as env:
        assert env._pool.watcher is None
        assert env._pool.plan.sparse_nbytes == 0
        assert not env._pool.slab.groups[0].journal


def replay(*arguments, text=None):
    threads = torch.get_num_threads()
    try:
        return CliRunner().invoke(
            app, ["replay", *map(str, arguments)], env={"COLUMNS": "200"}, input=text
        )
    finally:
        torch.set_num_threads(threads)


def fail(
    folder, make, *, num_envs=3, at=1, num_steps=9, options=None, wanted=1, **fault
):
    """Step faulty envs until one fails; return the error, its capsule, and the actions."""
    options = _options(folder) if options is None else options
    kwargs = [fault if env_id == at else {} for env_id in range(num_envs)]
    rng, actions = np.random.default_rng(0), []
    with make(num_envs, FaultyEnv, env_kwargs=kwargs, seed=7, options=options) as env:
        try:
            root = env.reset()
            for _ in range(num_steps):
                actions.append(rng.integers(0, 5, num_envs))
                root["action"] = torch.from_numpy(actions[-1])
                _, root = env.step_and_maybe_reset(root)
        except (EnvError, WorkerLost, WorkerTimeout) as error:
            path, *others = sorted((folder / "crashes").iterdir())
            assert len(others) == wanted - 1
            return error, path, [int(one[at]) for one in actions]
    raise AssertionError("no failure")


FAILURES = {
    "segfault": (WorkerLost, "WorkerLost (SIGSEGV(-11)) in step 3."),
    "exit": (WorkerLost, "WorkerLost (exit code 3) in step 3."),
    "sleep": (WorkerTimeout, "WorkerTimeout (a hang) in step 3."),
    "value_error": (EnvError, f"EnvError (ValueError: {BROKEN}) in step 3."),
    "wrong_shape": (
        EnvError,
        "EnvError (SpecError: writing observation failed: expected int64 (3,), got",
    ),
}


@pytest.mark.broken_pool
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "start_method"),
    [
        *((fault, "zygote") for fault in FAILURES),
        ("segfault", "portable"),
        ("value_error", "portable"),
    ],
)
def test_a_failure_is_written_and_fails_again(
    tmp_path, monkeypatch, fault, start_method
):
    kind, words = FAILURES[fault]
    options = _options(
        tmp_path,
        step_timeout_s=3.0 if fault == "sleep" else 60.0,
        start_method=start_method,
    )
    error, path, actions = fail(
        tmp_path, TWO_WORKERS, fault=fault, step=3, options=options
    )
    assert type(error) is kind
    assert error.context["capsule"] == str(path)
    assert (
        f"The episode is in {path}: `envherd replay {path}` runs it again."
        in error.message
    )
    capsule = load_capsule(path)
    assert capsule.inputs["action",].tolist() == actions
    facts = capsule.facts
    assert (facts["env"], facts["env_kwargs"]) == (FAULTY, {"fault": fault, "step": 3})
    assert (facts["env_id"], facts["episode"], facts["num_steps"]) == (1, 0, 3)
    assert (facts["root_seed"], facts["seed"]) == (7, episode_seed(7, 1, 0))
    assert facts["missing"] == []
    assert "envherd/workers" in (
        facts["failure"]["stack"] or "exit code 3: envherd/workers"
    )
    assert facts["versions"]["numpy"] == np.__version__
    monkeypatch.chdir(tmp_path)
    again = replay(path, "--trust")
    assert f"It failed again: {words}" in again.stdout, again.output
    assert "But" not in again.stdout
    assert again.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["serial", "parallel", "in python", "rebuilt", "leaves"]
)
@pytest.mark.parametrize("drive", DRIVES)
def test_a_failure_in_every_way_of_stepping(tmp_path, drive, way):
    make, options = WAYS[way]
    kwargs, options = (
        [{"length": 3}, {"fault": "value_error", "step": 4}],
        _options(tmp_path, **options),
    )
    with (
        make(2, FaultyEnv, env_kwargs=kwargs, options=options) as env,
        pytest.raises(EnvError) as caught,
    ):
        drive(env, 9)
    path = caught.value.context["capsule"]
    assert path.endswith("env1-episode0-step4.capsule")
    again = replay(path, "--trust")
    assert again.exit_code == 0, again.output
    assert "But" not in again.stdout  # the observation before the last step is the same


@pytest.mark.slow
def test_a_failure_in_a_later_episode(tmp_path):
    """The env raises in its second episode, which its successor does not reach."""
    _, path, _ = fail(
        tmp_path,
        SerialEnv,
        fault="value_error",
        at=0,
        episode=1,
        num_envs=1,
        step=2,
        length=4,
    )
    facts = load_capsule(path).facts
    assert (facts["episode"], facts["num_steps"]) == (1, 2)
    assert facts["seed"] == episode_seed(7, 0, 1)
    again = replay(path, "--trust")
    assert again.exit_code == 3
    assert "It did not fail: 2 steps went through." in again.stderr + again.stdout
    assert "its env had earlier episodes" in again.stdout
    forced = replay(
        path, "--env", FAULTY, "--env-kwargs", '{"fault": "value_error", "step": 1}'
    )
    assert forced.exit_code == 1
    assert (
        f"It failed otherwise: EnvError (ValueError: {BROKEN}) in step 1."
        in forced.stdout + forced.stderr
    )


@pytest.mark.slow
def test_a_nan_is_written_and_found_again(tmp_path):
    options = _options(tmp_path, check_finite=True)
    with (
        SerialEnv(1, NanEnv, seed=7, options=options) as env,
        pytest.raises(EnvError, match="got nan") as caught,
    ):
        env.rollout(5)
    again = replay(caught.value.context["capsule"], "--trust")
    assert again.exit_code == 0, again.output
    assert "in step 2" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize("reseed", [False, True])
def test_a_copy_of_an_env_has_its_actions_and_arguments(tmp_path, reseed):
    kwargs = [{"fault": "value_error", "step": 4}, {"step": 5}]
    actions = [(0, 3), (1, 3), (2, 4), (0, 4)]
    with ParallelEnv(
        2,
        FaultyEnv,
        num_workers=2,
        env_kwargs=kwargs,
        seed=7,
        options=_options(tmp_path),
    ) as env:
        root = env.reset()
        for number, pair in enumerate(actions[:3]):
            if number == 2:
                env.branch(0, [1], reseed=reseed)
                root = env.current()
            _, root = env.step_and_maybe_reset(root.set("action", torch.tensor(pair)))
        with pytest.raises(EnvError):
            env.step(root.set("action", torch.tensor(actions[3])))
    found = {
        load_capsule(path).facts["env_id"]: load_capsule(path)
        for path in (tmp_path / "crashes").iterdir()
    }
    assert found[0].inputs["action",].tolist() == [0, 1, 2, 0]
    assert found[1].inputs["action",].tolist() == [0, 1, 4, 4]
    assert found[1].facts["seed"] == episode_seed(7, 0, 0)
    assert found[1].facts["env_kwargs"] == kwargs[0]
    assert bool(found[1].facts["missing"]) == reseed


@pytest.mark.broken_pool
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["segfault", "value_error"])
def test_a_reset_that_fails(tmp_path, fault):
    with (
        pytest.raises((EnvError, WorkerLost)) as caught,
        ParallelEnv(
            1,
            FaultyEnv,
            env_kwargs={"fault": fault, "at": "reset"},
            seed=7,
            options=_options(tmp_path),
        ) as env,
    ):
        env.reset()
    path = Path(caught.value.context["capsule"])
    assert load_capsule(path).facts["failure"]["phase"] == "reset"
    again = replay(path, "--trust")
    assert again.exit_code == 0, again.output
    assert "in the reset." in again.stdout


@pytest.mark.broken_pool
@pytest.mark.slow
def test_a_restarted_worker_leaves_a_capsule_in_the_log(tmp_path, caplog):
    flag = str(tmp_path / "flag")
    options = _options(tmp_path, on_worker_loss="restart")
    kwargs = {"fault": "segfault", "step": 3, "flag": flag}
    with (
        caplog.at_level(logging.WARNING),
        ParallelEnv(1, FaultyEnv, env_kwargs=kwargs, options=options) as env,
    ):
        env.rollout(9, act, break_when_any_done=False)
    (path,) = (tmp_path / "crashes").iterdir()
    assert str(path) in caplog.text
    assert load_capsule(path).facts["num_steps"] == 3


@pytest.mark.parametrize(
    "make", [SerialEnv, pytest.param(TWO_WORKERS, marks=pytest.mark.slow)]
)
def test_each_env_that_raises_has_a_capsule(tmp_path, make):
    kwargs = [{"fault": "value_error", "step": step} for step in (2, 9, 2)]
    with make(3, FaultyEnv, env_kwargs=kwargs, options=_options(tmp_path)) as env:
        with pytest.raises(EnvError, match=r"env0-episode0-step2\.capsule") as caught:
            env.rollout(5, act)
        assert [path.name[:4] for path in sorted((tmp_path / "crashes").iterdir())] == [
            "env0",
            "env2",
        ]
        assert "env2-episode0-step2.capsule" in caught.value.message
        with pytest.raises(EnvError, match=r"env0-episode1-step2\.capsule"):
            env.rollout(5, act)


def test_at_most_max_files_capsules_are_written(tmp_path):
    options = ExecutorOptions(capsules=Capsules(tmp_path / "crashes", max_files=2))
    with SerialEnv(
        1, FaultyEnv, env_kwargs={"fault": "value_error"}, options=options
    ) as env:
        messages = []
        for _ in range(3):
            with pytest.raises(EnvError) as caught:
                env.rollout(5, act)
            messages.append(caught.value.message)
    assert [".capsule" in message for message in messages] == [True, True, False]
    assert "No capsule was written" in messages[2]
    assert len(list((tmp_path / "crashes").iterdir())) == 2


def test_a_file_is_never_replaced_and_a_failed_write_hides_nothing(tmp_path):
    for number in (1, 2):
        fail(tmp_path, SerialEnv, fault="value_error", wanted=number)
        assert len(list((tmp_path / "crashes").iterdir())) == number
    with SerialEnv(
        1, FaultyEnv, env_kwargs={"fault": "value_error"}, options=_options(tmp_path)
    ) as env:
        for path in (tmp_path / "crashes").iterdir():
            path.unlink()
        (tmp_path / "crashes").rmdir()
        with pytest.raises(
            EnvError, match="Its capsule could not be written: FileNotFoundError"
        ):
            env.rollout(5, act)


@pytest.mark.parametrize(
    "make", [SerialEnv, pytest.param(TWO_WORKERS, marks=pytest.mark.slow)]
)
def test_journal_keeps_the_latest_actions_of_a_long_episode(tmp_path, make):
    options = ExecutorOptions(
        capsules=Capsules(tmp_path / "crashes", journal_bytes=5 * 8)
    )
    _, path, actions = fail(
        tmp_path, make, fault="value_error", step=13, num_steps=20, options=options
    )
    capsule = load_capsule(path)
    assert capsule.facts["num_steps"] == len(actions) == 13
    assert capsule.inputs["action",].tolist() == actions[-5:]
    assert capsule.facts["missing"] == ["its first actions (Capsules.journal_bytes)"]
    again = replay(path, "--trust")
    assert again.exit_code == 2
    assert "lacks its first actions" in again.stderr


def test_episode_with_partial_resets_cannot_be_replayed(tmp_path):
    make = NamedFactory("gymnasium_vec", "CartPole-v1", num_rows=2)
    with SerialEnv(1, make, seed=1, options=_options(tmp_path)) as env:
        random_steps(env, 60)
        assert journal_of(env).facts[KEPT_FLAGS] & JournalFlag.IN_PARTS
        fault = {
            "env_id": 0,
            "phase": "step",
            "type_name": "ValueError",
            "message": "",
            "traceback": "",
        }
        path = Path(
            env._pool.watcher.add_to(EnvError("it failed."), 0, fault).context[
                "capsule"
            ]
        )
    again = replay(path)
    assert again.exit_code == 2
    assert "lacks the resets of single rows of the env" in again.stderr


class Fussy(gymnasium.Env):
    """Raises in its third step if it was reset with these options and this seed."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options, self.drawn, self.count = options, self.np_random.random(), 0
        return np.array([self.drawn]), {}

    def step(self, action):
        self.count += 1
        if self.count == 3 and self.options == {"level": [2, 3]}:
            raise RuntimeError(f"drawn {self.drawn}")
        return np.array([self.drawn]), 0.0, False, False, {}


class Fragile(Fussy):
    """Raises in the third step of its first episode."""

    def step(self, action):
        self.count += 1
        if self.count == 3:
            raise RuntimeError(f"broke at {self.drawn} with {self.options}")
        return np.array([self.drawn]), 0.0, False, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("make", [SerialEnv, TWO_WORKERS])
def test_seeds_and_options_of_the_reset_are_kept(tmp_path, make):
    with make(2, Fussy, options=_options(tmp_path)) as env:
        env.reset()
        env.reset(seed=[11, 12], options={"level": (2, 3)})
        env.reset(list_of_kwargs=[{}, {"options": {"level": [2, 3]}}], seed=[11, 12])
        with pytest.raises(EnvError) as caught:
            env.rollout(5, auto_reset=False)
    path = caught.value.context["capsule"]
    facts = load_capsule(Path(path)).facts
    assert (facts["env_id"], facts["seed"], facts["reset_options"]) == (
        1,
        12,
        {"options": {"level": [2, 3]}},
    )
    again = replay(path, "--trust")
    assert again.exit_code == 0, again.output


def test_missing_parts_of_a_capsule_are_listed(tmp_path):
    kwargs = {"fault": "value_error", "flag": None}
    make = functools.partial(FaultyEnv, **kwargs)
    assert reference_of(make) == {"env": FAULTY, "kwargs": kwargs}
    assert reference_of(
        functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=9)
    ) == {
        "env": "gymnasium:CartPole-v1",
        "kwargs": {"max_episode_steps": 9},
    }
    assert reference_of(NamedFactory("gymnasium", "CartPole-v1")) == {
        "env": "gymnasium:CartPole-v1",
        "fields": {},
    }
    assert reference_of(lambda: 1) == {}
    with SerialEnv(
        1, lambda **_: make(), env_kwargs={"x": {1, 2}}, options=_options(tmp_path)
    ) as env:
        env.reset()
        env.set("anything", [1])
        with pytest.raises(EnvError) as caught:
            env.rollout(5, act, auto_reset=False)
    path = caught.value.context["capsule"]
    assert load_capsule(Path(path)).facts["missing"] == [
        "a name of the env (its factory is not a function of a module)",
        "the arguments of the env (no plain data)",
        "what the program called, set or loaded during the episode",
    ]
    again = replay(path)
    assert again.exit_code == 2
    assert (
        "its factory is not a function of a module. Pass --env MODULE:CALLABLE."
        in again.stderr
    )
    named = replay(path, "--env", FAULTY, "--env-kwargs", json.dumps(kwargs))
    assert named.exit_code == 0, named.output


@pytest.mark.broken_pool
@pytest.mark.slow
def test_a_lambda_is_run_again_from_its_pickle_if_it_is_trusted(tmp_path):
    options = ExecutorOptions(capsules=Capsules(tmp_path / "crashes", pickle=True))
    step = 3
    with (
        pytest.raises(WorkerLost) as caught,
        ParallelEnv(
            1, lambda: FaultyEnv("segfault", step=step), options=options
        ) as env,
    ):
        env.rollout(9, act)
    path = caught.value.context["capsule"]
    assert "or --trust, which loads the pickled factory" in replay(path).stderr
    assert replay(path, "--trust").exit_code == 0


# ---- data, not code ----------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """Return a function that writes a capsule of CartPole whose facts it changes."""
    options = dict.fromkeys(
        ["check_finite", "isolate_rng", "episode_statistics"], False
    )
    options |= {
        "episode_seeds": True,
        "env_type": "auto",
        "step_timeout_s": None,
        "reset_timeout_s": None,
    }
    usual = {
        "env": "gymnasium:CartPole-v1",
        "env_kwargs": {},
        "fields": {},
        "search": [str(tmp_path)],
        "missing": [],
        "options": {**options, "worker_threads": 1},
        "reset_options": None,
        "observation": None,
        "root_seed": 0,
        "env_id": 0,
        "episode": 0,
        "seed": 1,
        "num_steps": 2,
        "failure": {
            "error": "EnvError",
            "type": "ValueError",
            "message": "x",
            "phase": "step",
        },
    }

    def store(pickled=None, **facts):
        path = tmp_path / "one.capsule"
        path.unlink(missing_ok=True)
        Capsule({**usual, **facts}, {("action",): np.array([0, 1])}, pickled).save(path)
        return path

    return store


EVIL = """
    import pathlib
    pathlib.Path({mark!r}).touch()

    def make(*args, **kwargs):
        pathlib.Path({mark!r}).touch()
"""


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


@pytest.mark.parametrize(
    "facts",
    [
        {"env": "python:evil:make"},
        {"env": "evil:make"},
        {"env": "torchrl:evil:make"},
        {"env": "gymnasium:evil:CartPole-v1"},
        {"env": "pettingzoo:evil"},
        {"env_kwargs": {"config": [{"type": "evil.make"}]}},
        {"reset_options": {"options": {"type": "evil.make"}}},
        {"env": None},
    ],
)
def test_names_in_a_capsule_are_not_called(tmp_path, monkeypatch, stored, facts):
    (tmp_path / "evil.py").write_text(
        textwrap.dedent(EVIL.format(mark=str(tmp_path / "ran")))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    result = replay(stored(pickle.dumps(Evil(str(tmp_path / "ran"))), **facts))
    assert result.exit_code == 2, result.output
    assert "--trust" in result.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_capsule_of_a_named_env_needs_no_trust_and_imports_nothing_local(
    tmp_path, stored
):
    path = stored(pickle.dumps(Evil(str(tmp_path / "ran"))))
    for name in ("gymnasium", "json", "numpy", "random"):
        (tmp_path / f"{name}.py").write_text(
            textwrap.dedent(EVIL.format(mark=str(tmp_path / "ran")))
        )
    command = [
        sys.executable,
        "-P",
        "-c",
        "import sys; from envherd.executor.cli import main; sys.exit(main())",
    ]
    done = subprocess.run(
        [*command, "replay", path.name],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "It did not fail: 2 steps went through." in done.stdout, done.stderr
    assert done.returncode == 3
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_one_clear_error(tmp_path, stored):
    whole = stored().read_bytes()
    broken = [whole[:size] for size in range(0, len(whole), 97)]
    for position in range(0, len(whole), 61):
        changed = bytearray(whole)
        changed[position] ^= 0xFF
        broken.append(bytes(changed))
    path, refused = tmp_path / "broken.capsule", 0
    for data in broken:
        path.write_bytes(data)
        try:
            load_capsule(path)  # some bytes of the archive mean nothing
        except CapsuleError as error:
            refused += str(error).startswith(
                f"reading {path} failed: expected a capsule, got a file that is none, or"
            )
    assert refused > 0.8 * len(broken)


@pytest.mark.parametrize(
    "facts",
    [
        {"env": 3},
        {"env": "a\x1b[2J"},
        {"env_kwargs": []},
        {"search": [3]},
        {"root_seed": "0"},
        {"seed": -1},
        {"num_steps": True},
        {"failure": None},
        {"options": {}},
        {"options": {"step_timeout_s": "soon"}},
        {"fields": {"unknown": 1}},
        {"fields": {"family": "python", "name": "evil:make"}},
        {"fields": {"env": "evil"}},
        {"fields": {"render_mode": "human"}},
        {"fields": {"device": "cpu\x1b[2J"}},
        {"fields": {"render_mode": "rgb_array", "roles": ["a"]}},
        {"failure": {"exit_code": 2**70}},
        {"seed": 2**70},
        {"env_id": 2**70},
        {"num_steps": 3},
    ],
)
def test_facts_of_wrong_types_are_refused(stored, facts):
    result = replay(stored(**facts))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: reading ")
    assert "\x1b[2J" not in result.stderr


def data_of(members, compression=zipfile.ZIP_STORED, **changes):
    """Return an archive; its directory says something else about the last member."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        for name, value in changes.items():
            setattr(archive.infolist()[-1], name, value)
    return memory.getvalue()


DAMAGED = "expected a capsule, got a file that is none, or is damaged"


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        (b"int64", {"compression": zipfile.ZIP_DEFLATED}, "members are compressed"),
        (b"int64", {"file_size": 2**40}, "larger than the file"),
        (b"object", {}, "bytes for"),
        (b"(1,i4", {}, "bytes for"),
        (b"\\u001b[2J", {}, "bytes for"),
        (b"int64", {"flag_bits": 1}, DAMAGED),
        (b"int64", {"extract_version": 200}, DAMAGED),
        (b"int64", {"header_offset": 10**6}, DAMAGED),
        (b"int64", {"CRC": 0}, DAMAGED),
    ],
)
def test_archives_that_are_not_as_they_were_written_are_refused(
    stored, dtype, changes, message
):
    """No archive is unpacked that is larger than its file."""
    path = stored()
    with zipfile.ZipFile(path) as archive:
        members = {
            name: archive.read(name).replace(b"int64", dtype)
            for name in archive.namelist()
        }
    path.write_bytes(data_of(members, **changes))
    result = replay(path)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "\x1b[2J" not in result.stderr


def test_factory_in_a_file_never_names_another_env():
    kinds = [
        NamedFactory,
        *(family.factory for family in FAMILIES.values() if family.factory),
    ]
    identity = {"family", "name", *(dataclasses.fields(kind)[0].name for kind in kinds)}
    assert not identity & _FIELDS.keys()


# ---- families, facades, and the command's options -----------------------------------------------------


HEALTHY = {
    "gymnasium": ("gymnasium:CartPole-v1", {}, ()),
    "meltingpot": (
        "meltingpot:commons_harvest__open",
        {"deterministic": True, "keys": ("RGB",)},
        ("meltingpot",),
    ),
    "pettingzoo": ("pettingzoo:mpe2.simple_spread_v3", {}, ("pettingzoo",)),
    "dm_env": ("dm_control:cartpole/balance", {}, ("dm-control",)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=needs(*HEALTHY[name][2])) for name in HEALTHY]
)
def test_the_episodes_of_all_families_are_run_again(tmp_path, family):
    from envherd.workers.adapters.env_names import factory_for

    name, fields, _ = HEALTHY[family]
    made = dataclasses.replace(factory_for(name), **fields)
    with ParallelEnv(2, made, num_workers=1, seed=3, options=_options(tmp_path)) as env:
        root = env.reset()
        for _ in range(7):
            before = {
                key: array.copy()
                for key, array in env._engine.positions.latest_root(1).items()
            }
            _, root = env.step_and_maybe_reset(env.rand_action(root))
        # as if the latest step had failed
        env._pool.watcher.latest_root = lambda _env_id: before
        fault = {
            "env_id": 1,
            "phase": "step",
            "type_name": "ValueError",
            "message": "",
            "traceback": "",
        }
        path = Path(
            env._pool.watcher.add_to(EnvError("it failed."), 0, fault).context[
                "capsule"
            ]
        )
    capsule = load_capsule(path)
    assert capsule.facts["env"] == name
    trust = ["--trust"] if family == "pettingzoo" else []
    again = replay(path, *trust)
    assert again.exit_code == 3, again.output
    assert "It did not fail: 7 steps went through." in again.stdout
    (key, values), *_ = capsule.inputs.items()
    values[2] = (values[2] + 1) % 2  # another action
    Capsule(capsule.facts, {**capsule.inputs, key: values}).save(
        tmp_path / "other.capsule"
    )
    other = replay(tmp_path / "other.capsule", *trust)
    assert other.exit_code == 1, other.output
    assert (
        "It did not fail, and differed before: the observation before step 7 is another."
        in other.stdout
    )


@pytest.mark.slow
def test_it_stops_in_the_debugger_and_films(tmp_path):
    _, path, _ = fail(tmp_path, SerialEnv, fault="value_error", step=3)
    debugged = replay(path, "--trust", "--pdb", text="p step\nc\np self.num_steps\nc\n")
    assert debugged.exit_code == 0, debugged.output
    assert "(Pdb) 3\n" in debugged.stdout
    assert "breaking_envs.py" in debugged.stdout  # it stops again in the env's step
    assert "(Pdb) 2\n" in debugged.stdout
    assert sys.gettrace() is None


@pytest.mark.slow
@needs("media")
def test_replay_records_a_film(tmp_path, stored):
    filmed = replay(stored(), "--record", tmp_path / "film.mp4")
    assert filmed.exit_code == 3, filmed.output
    assert (tmp_path / "film.mp4").stat().st_size > 1000


def test_options_that_do_not_fit_are_refused(tmp_path, stored):
    assert replay(stored(), "--workers", 2).exit_code == 2
    assert replay(tmp_path, "--trust").exit_code == 2


def test_a_simulator_in_this_process_refuses_capsules(tmp_path):
    with pytest.raises(
        ValueError,
        match="SerialEnv of a torch simulator failed: expected capsules=None, got",
    ):
        SerialEnv(1, torch_simulators.Counter, options=_options(tmp_path))


@needs("torchrl")
def test_the_facade_of_torchrl_refuses_capsules(tmp_path):
    from envherd.torchrl import ParallelEnv as Facade

    with pytest.raises(
        ValueError, match="TorchRL facade failed: expected capsules=None, got"
    ):
        Facade(2, CountingEnv, options=_options(tmp_path)).reset()


def alone():
    """Return `Fragile` as a PettingZoo env with one agent."""
    return faulty_envs.alone(Fragile())


def _vector_env(host, options):
    if host == "sb3":
        from envherd.sb3 import SubprocVecEnv

        env = SubprocVecEnv([Fragile] * 2, num_workers=2, options=options)
        env.seed(5)
        return env
    if host == "pettingzoo":
        from envherd.pettingzoo import ParallelVectorEnv

        return ParallelVectorEnv([alone] * 2, num_workers=2, options=options)
    from envherd.gymnasium import AsyncVectorEnv, SyncVectorEnv

    if host == "gymnasium":
        return AsyncVectorEnv([Fragile] * 2, num_workers=2, options=options)
    return SyncVectorEnv([Fragile] * 2, options=options)


HOSTS = [
    "gymnasium",
    "gymnasium in this process",
    *(pytest.param(name, marks=needs(name)) for name in ("sb3", "pettingzoo")),
]


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_facades_pass_the_option(tmp_path, host):
    # Whose actions have another layout there.
    rules = Capsules(tmp_path / "crashes", pickle=host == "pettingzoo")
    env, error = _vector_env(host, ExecutorOptions(capsules=rules)), None
    try:
        env.reset(**({} if host == "sb3" else {"seed": 5, "options": {"level": 3}}))
        for action in (0, 1, 1, 0):
            actions = np.array([action, action])
            env.step({"agent": actions} if host == "pettingzoo" else actions)
    except RuntimeError as raised:
        error = raised
    finally:
        env.close()
    path = tmp_path / "crashes/env1-episode0-step3.capsule"
    assert str(path) in str(error)
    capsule = load_capsule(path)
    assert (
        capsule.facts["env"]
        == f"python:{HERE}:{'alone' if host == 'pettingzoo' else 'Fragile'}"
    )
    assert capsule.facts["seed"] == 6
    assert capsule.facts["reset_options"] == (
        None if host == "sb3" else {"options": {"level": 3}}
    )
    assert [values.ravel().tolist() for values in capsule.inputs.values()] == [
        [0, 1, 1]
    ]
    again = replay(path, "--trust")
    assert again.exit_code == 0, again.output
    assert "But" not in again.stdout
