"""The partial-reset contract in pytest, for envs of any family; see `envherd.executor.testing`.

    pytest --envherd my_envs:make --together 2      # each rule is a test, and other tests are not collected

    def test_my_env(envherd_contract):              # in a test file: each rule is a test, with its own message
        envherd_contract(MyEnv, num_steps=300)

Guarantees: without the option and the fixture it imports nothing but pytest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("envherd", "the contract of reinforcement-learning envs")
    what = "check the env that a callable of a module builds, or one of a name such as gymnasium:CartPole-v1"
    group.addoption("--envherd", metavar="MODULE:MAKE", help=what)
    what = "also check that N envs have the same data in one process as apart"
    group.addoption("--together", type=int, default=0, metavar="N", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """With `--envherd`, collect other tests only if the command line names them."""
    if (
        config.getoption("--envherd")
        and config.args_source is not pytest.Config.ArgsSource.ARGS
    ):
        config.args[:] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each rule."""
    if "envherd_contract" in metafunc.fixturenames:
        rules = _names(metafunc.config)
        metafunc.parametrize(
            "envherd_contract", rules, indirect=True, ids=[*rules.values()]
        )


@pytest.fixture
def envherd_contract(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that checks one rule: `(factory, **options)`, as `check_env_contract`."""
    from envherd.executor.testing import Contract

    together = request.config.getoption("--together")
    return lambda factory, **options: _check(
        Contract(factory, **{"together": together, **options}), request.param
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the tests of `--envherd`."""
    name = config.getoption("--envherd")
    if not name:
        return
    from envherd.executor.sending.blueprint import as_factory
    from envherd.executor.testing import Contract
    from envherd.workers.errors import FactoryError

    sys.path.insert(0, str(config.invocation_params.dir))  # as `python -m pytest` does
    try:
        contract = Contract(as_factory(name), together=config.getoption("--together"))
    except FactoryError as error:
        raise pytest.UsageError(f"--envherd: {error}") from None
    for rule, title in _names(config).items():
        items.append(
            RuleTest.from_parent(session, name=f"{name}[{title}]", of=(contract, rule))
        )


class RuleTest(pytest.Item):
    """A rule for one env."""

    def __init__(self, *, of: tuple[Any, int], **parts: Any) -> None:
        super().__init__(**parts)
        self._of = of

    def runtest(self) -> None:
        """Check it."""
        _check(*self._of)

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None
    ) -> Any:
        """Return the message alone, if it is one of this package."""
        error = excinfo.value
        is_ours = type(error).__module__.startswith("envherd.")
        return str(error) if is_ours else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Return the name for reports."""
        return self.path, None, self.name


def _names(config: pytest.Config) -> dict[int, str]:
    """Return the names of the tests, by rule."""
    from envherd.executor.testing import Contract

    rules = [*Contract.RULES, *([10] if config.getoption("--together") > 1 else [])]
    return {rule: f"rule_{rule}: {Contract.TITLES[rule]}" for rule in sorted(rules)}


def _check(contract: Any, rule: int) -> None:
    if rule not in contract.rules:  # of the env
        pytest.skip("the env cannot be saved")
    contract.check(rule)
