"""A short run of the fuzzers with fixed seeds (`make fuzz` is the long one); errors of an executor are detected."""

from __future__ import annotations

import pytest

from tests.oracles.fuzz_envs import Kind, Life
from tests.oracles.fuzzing import Given, Oracle, Row, Transition, Violation

PLACE = (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_no_row_is_wrong_and_nothing_hangs(script_host, tmp_path):
    """One short case of each option set, as far as six seconds go."""
    arguments = ["--seed", "20", "--cases", "40", "--operations", "25", "--minutes", "0.1"]
    arguments += ["--skip", "torchrl"]  # whose workers take seconds to start
    script = tmp_path / "script.py"
    script.write_text("import sys; from tools.fuzz import main; sys.exit(main())\n")
    done = script_host.run(script, *arguments, folder=tmp_path, output=tmp_path, ENVHERD_FUZZ_HANG_S="60")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def life(tmp_path):
    one = Life(str(tmp_path), 0, 0, length=3)
    yield one
    one.close()


@pytest.fixture
def oracle(tmp_path):
    return Oracle(str(tmp_path), [PLACE], checks_seeds=False)


def stepped(life, action=1, **changed):
    row, reward, terminated, truncated = life.step(action)
    after = Row(*row.tolist())
    flags = {"done": terminated or truncated, "terminated": terminated, "truncated": truncated}
    one = {"root": None, "action": action, "next": after, "reward": reward, **flags, "interrupted": False}
    return Transition(**(one | changed))


def begun(life, oracle):
    row = Row(*life.reset(4, 0).tolist())
    oracle.read_diary()
    oracle.begin(PLACE, row)
    return row


def test_what_was_really_done_is_accepted(life, oracle):
    for _ in range(2):
        begun(life, oracle)
        for _ in range(3):
            one = stepped(life)
            oracle.read_diary()
            oracle.follow(PLACE, one)
    assert oracle.num_transitions == 6


@pytest.mark.parametrize("changed", [{"reward": 0.5}, {"action": 2}, {"truncated": True, "done": True}])
def test_a_wrong_value_is_seen(life, oracle, changed):
    begun(life, oracle)
    one = stepped(life)._replace(**changed)
    oracle.read_diary()
    with pytest.raises(Violation):
        oracle.follow(PLACE, one)


def test_a_step_that_is_left_out_is_seen(life, oracle):
    begun(life, oracle)
    life.step(0)
    one = stepped(life)
    oracle.read_diary()
    with pytest.raises(Violation, match="from"):
        oracle.follow(PLACE, one)


def test_a_step_that_is_handed_out_twice_is_seen(life, oracle):
    begun(life, oracle)
    one = stepped(life)
    oracle.read_diary()
    oracle.follow(PLACE, one)
    oracle.forget([PLACE])
    with pytest.raises(Violation, match="before"):
        oracle.follow(PLACE, one)


def test_a_row_that_nobody_made_is_seen(life, oracle):
    row = begun(life, oracle)
    with pytest.raises(Violation, match="torn"):
        oracle.root(PLACE, row._replace(t=1), done=False)


def test_an_interrupted_row_must_be_the_last_true_one(life, oracle):
    row = begun(life, oracle)
    one = stepped(life, reward=0.0, done=True, truncated=True, interrupted=True)
    oracle.read_diary()
    with pytest.raises(Violation, match="interrupted"):
        oracle.follow(PLACE, one)
    oracle.follow(PLACE, one._replace(next=row))


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_step_without_a_reset_is_seen(life, oracle, is_reset):
    if is_reset:
        begun(life, oracle)
        for _ in range(3):
            life.step(0)
    life.step(0)
    with pytest.raises(Violation, match="after its end" if is_reset else "without a reset"):
        oracle.read_diary()


def test_a_reset_without_its_seed_is_seen(life, oracle):
    row = Row(*life.reset(None, 0).tolist())
    oracle.read_diary()
    with pytest.raises(Violation, match="seed"):
        oracle.begin(PLACE, row, Given(seeds=(5,)))
    assert oracle.made[row.nonce, 0, 0][0] == Kind.RESET
