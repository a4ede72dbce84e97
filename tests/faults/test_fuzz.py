"""A short run of the fuzzers with fixed seeds (`make fuzz` is the long one); errors of an executor are detected."""

import pytest

from tests.oracles.fuzz_envs import Kind, Life
from tests.oracles.fuzzing import Given, Oracle, Row, Transition

PLACE = (0, 0)


@pytest.mark.long
@pytest.mark.timeout(290)
def test_no_row_is_wrong_and_nothing_hangs(script_host, tmp_path):
    """One short case of each option set, as far as six seconds go."""
    arguments = [
        "--seed",
        "20",
        "--cases",
        "40",
        "--operations",
        "25",
        "--minutes",
        "0.1",
    ]
    arguments += ["--skip", "torchrl"]  # whose workers take seconds to start
    done = script_host.run_text(
        "import sys; from tools.fuzz import main; sys.exit(main())\n",
        *arguments,
        folder=tmp_path,
        ENVHERD_FUZZ_HANG_S="60",
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def life(tmp_path):
    one = Life(str(tmp_path), 0, 0, length=3)
    yield one
    one.close()


@pytest.fixture
def oracle(tmp_path):
    return Oracle(str(tmp_path), [PLACE], checks_seeds=False)


def begun(life, oracle):
    row = Row.of(life.reset(4, 0))
    oracle.read_diary()
    oracle.begin(PLACE, row)
    return row


def take(life, oracle, **changed):
    """Step, hand out the transition with some values changed, and return it."""
    row, reward, terminated, truncated = life.step(1)
    oracle.read_diary()
    one = Transition(
        None,
        1,
        Row.of(row),
        reward,
        terminated or truncated,
        terminated,
        truncated,
        False,  # noqa: FBT003
    )
    one = one._replace(**changed)
    oracle.follow(PLACE, one)
    return one


CUT = {"reward": 0.0, "done": True, "truncated": True, "interrupted": True}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": 0.5}, "reward"),
        ({"action": 2}, "action 2"),
        ({"truncated": True, "done": True}, "it was"),
        (CUT, "interr"),
    ],
)
def test_a_wrong_value_is_seen(life, oracle, changed, message):
    begun(life, oracle)
    with pytest.raises(AssertionError, match=message):
        take(life, oracle, **changed)


def test_an_interrupted_row_that_is_the_last_true_one_is_accepted(life, oracle):
    take(life, oracle, next=begun(life, oracle), **CUT)


def test_a_step_that_is_left_out_is_seen(life, oracle):
    begun(life, oracle)
    life.step(0)
    with pytest.raises(AssertionError, match="from"):
        take(life, oracle)


def test_a_step_that_is_handed_out_twice_is_seen(life, oracle):
    begun(life, oracle)
    one = take(life, oracle)
    oracle.forget([PLACE])
    with pytest.raises(AssertionError, match="before"):
        oracle.follow(PLACE, one)


def test_oracle_finds_an_invented_row(life, oracle):
    with pytest.raises(AssertionError, match="torn"):
        oracle.root(PLACE, begun(life, oracle)._replace(t=1), done=False)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_step_without_a_reset_is_seen(life, oracle, is_reset):
    if is_reset:
        begun(life, oracle)
        for _ in range(3):
            life.step(0)
    life.step(0)
    with pytest.raises(
        AssertionError, match="after its end" if is_reset else "without a reset"
    ):
        oracle.read_diary()


def test_a_reset_without_its_seed_is_seen(life, oracle):
    row = Row.of(life.reset(None, 0))
    oracle.read_diary()
    with pytest.raises(AssertionError, match="seed"):
        oracle.begin(PLACE, row, Given(seeds=(5,)))
    assert oracle.made[row.nonce, 0, 0][0] == Kind.RESET
