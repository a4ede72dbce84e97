"""The contract as a plugin of pytest: each rule is a test, with its own message."""

import re
from pathlib import Path

import pytest

from tests.script_host import ScriptHost

ENVS = """
import gymnasium, numpy as np

class Good(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        return np.array([self.np_random.random()], np.float32), {}

    def step(self, action):
        self.now += 1
        return np.array([self.now], np.float32), 1.0, self.now > 7, False, {}

class High(Good):
    observation_space = gymnasium.spaces.Box(0, 5, (1,), np.float32)

class Random(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset()
"""
OWN = """
import my_envs, pytest

def test_mine(envherd_contract):
    envherd_contract(my_envs.High, num_steps=40)

def test_other():
    pass
"""


def _run(
    script_host: ScriptHost, folder: Path, *arguments: str
) -> tuple[dict[str, str], str]:
    """Return the outcome of each rule, by its number (or of another test, by its name), and the output."""
    (folder / "my_envs.py").write_text(ENVS)
    (folder / "test_mine.py").write_text(OWN)
    options = [
        "-p",
        "envherd.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "-v",
        "--tb=short",
    ]
    done = script_host.run(
        "-m",
        "pytest",
        *options,
        *arguments,
        folder=folder,
        output=folder,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    found = re.findall(
        r"(?:\[rule_(\d+): [^\n]*|::(test_\w+)) (PASSED|FAILED|SKIPPED)", done.stdout
    )
    return {
        rule or name: outcome for rule, name, outcome in found
    }, done.stdout + done.stderr


@pytest.mark.slow
def test_the_option_checks_each_rule_of_a_factory(
    script_host: ScriptHost, tmp_path: Path
) -> None:
    outcomes, text = _run(
        script_host,
        tmp_path,
        "--envherd",
        "my_envs:Random",
        "--together",
        "2",
        "-k",
        "rule_6 or rule_8 or rule_10",
    )
    assert outcomes == {"6": "FAILED", "8": "PASSED", "10": "FAILED"}, text
    assert "rule 6 is broken: expected observation" in text
    assert "so nothing was proved: the seed does not determine the env" in text
    assert "pytest_plugin.py" not in text


@pytest.mark.slow
def test_the_fixture_makes_a_test_of_each_rule(
    script_host: ScriptHost, tmp_path: Path
) -> None:
    outcomes, text = _run(script_host, tmp_path, "test_mine.py")
    broken = {str(rule): "FAILED" if rule == 8 else "PASSED" for rule in range(1, 10)}
    assert outcomes == {**broken, "test_other": "PASSED"}, text
    assert "Mend the env's observation_space" in text


def test_a_wrong_name_is_a_wrong_call(script_host: ScriptHost, tmp_path: Path) -> None:
    _, text = _run(script_host, tmp_path, "--envherd", "no_such_module:make")
    assert "ERROR: --envherd: " in text
    assert "INTERNALERROR" not in text
