"""Options are checked when they are created, and on the workers' machine."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from envherd.executor import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.options import _CHOICES, _NUMBERS, _SWITCHES
from envherd.workers.testing import CountingEnv
from tests.executor.drives import act

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
FIELDS = {field.name: field for field in dataclasses.fields(ExecutorOptions)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"step_timeout_s": -1}, "a number above 0, or None, got -1"),
        ({"step_timeout_s": "3"}, "a number above 0, or None, got '3'"),
        ({"reset_timeout_s": float("nan")}, "a number above 0, or None, got nan"),
        ({"close_timeout_s": -0.1}, "a number of at least 0, got -0.1"),
        ({"stall_log_s": None}, "a number above 0, got None"),
        ({"worker_threads": 0}, "an integer of at least 1, or None, got 0"),
        ({"max_restarts": 1.5}, "an integer of at least 0, got 1.5"),
        ({"max_restarts": True}, "an integer of at least 0, got True"),
        ({"ring_frames": 1}, "an integer of at least 2, got 1"),
        ({"poison": 1}, "True or False, got 1"),
        ({"check_actions": "loose"}, "one of ('strict', 'finite', 'off'), got 'loose'"),
        (
            {"env_vars": {"A": 1}},
            "a dict of names and values, or pairs of them, all texts (or a list of dicts, or a function), got {'A': 1}",
        ),
        (
            {"env_vars": [{"A": "1"}, {"A": 1}]},
            (
                "a dict of names and values, or pairs of them, all texts (or a list of dicts, or a function), got "
                "[{'A': '1'}, {'A': 1}]"
            ),
        ),
        ({"gpus": "0"}, "'all', a sequence of indices of GPUs, or None, got '0'"),
        ({"gpus": ()}, "'all', a sequence of indices of GPUs, or None, got ()"),
        ({"gpus": [-1]}, "'all', a sequence of indices of GPUs, or None, got [-1]"),
        ({"gpus": [True]}, "'all', a sequence of indices of GPUs, or None, got [True]"),
        (
            {"env_vars": ("A",)},
            "a dict of names and values, or pairs of them, all texts (or a list of dicts, or a function), got ('A',)",
        ),
        ({"preload": "numpy"}, "a sequence of module names, or None, got 'numpy'"),
        ({"affinity": ()}, "a sequence of CPU ids, or None, got ()"),
        ({"recycle_after": 0}, "an integer of at least 1, or None, got 0"),
        ({"max_worker_memory": 0}, "an integer of at least 1, or None, got 0"),
        ({"env_type": "jax"}, "one of ('torch', 'numpy', 'auto'), got 'jax'"),
    ],
)
def test_impossible_options_are_refused_by_name(options, expected):
    (name,) = options
    with pytest.raises(
        ValueError,
        match=re.escape(f"ExecutorOptions failed: expected {name} to be {expected}."),
    ):
        ExecutorOptions(**options)


def test_options_that_exclude_each_other():
    with pytest.raises(
        ValueError,
        match="ExecutorOptions failed: expected isolate_rng=False with env_threads",
    ):
        ExecutorOptions(env_threads=True, isolate_rng=True)


def test_every_option_is_checked():
    lists = {"preload", "affinity", "env_vars", "gpus", "infos"}
    assert {*_NUMBERS, *_CHOICES, *_SWITCHES, *lists} == FIELDS.keys()


@pytest.mark.parametrize(
    "options", [{"preload": ("nump.linalg",)}, {"affinity": (0, 9999)}]
)
def test_options_beyond_the_machine_are_refused_before_a_start(options):
    with pytest.raises(
        ValueError, match=f"expected {next(iter(options))} to be .*, got "
    ):
        ParallelEnv(1, CountingEnv, options=ExecutorOptions(**options))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            {"capsules": "crashes"},
            "Keep the seed and the actions, and run the episode in a SerialEnv (docs/errors.md).",
        ),
        ({"nice": 5}, "Call os.setpriority(os.PRIO_PROCESS, 0, N) in the factory."),
        ({"info_keys": ("lives",)}, 'Use infos={"NAME": int}.'),
        ({"pickle_replies": True}, 'Use infos="pickle".'),
        (
            {"reset_ahead": True},
            "Step with send and recv: other envs are then stepped while one is reset.",
        ),
        ({"start_method": "fork"}, 'Use start_method="zygote" with preload=().'),
    ],
)
def test_options_of_earlier_versions_are_refused_with_what_to_do_instead(
    options, advice
):
    with pytest.raises(
        ValueError, match=f"ExecutorOptions failed: .* {re.escape(advice)}$"
    ):
        ExecutorOptions(**options)


def test_the_page_has_every_option_with_its_default():
    rows: dict[str, Any] = dict(
        re.findall(r"^\| `([a-z_]+)` \| `([^`]*)` \|", PAGE.read_text(), re.MULTILINE)
    )
    assert rows == {name: repr(field.default) for name, field in FIELDS.items()}


def test_shares_with_first_env_id_have_the_data_of_the_whole_batch():
    def rolled(num_envs, first_env_id):
        options = ExecutorOptions(first_env_id=first_env_id)
        with SerialEnv(num_envs, CountingEnv, seed=3, options=options) as env:
            return env.rollout(12, act, break_when_any_done=False)

    shares = torch.cat([rolled(2, 0), rolled(3, 2)])
    assert (shares == rolled(5, 0)).all()
    assert shares["next", "done"].sum() > 4
