"""Names of envs on the command line, and their factories."""

import pickle
import sys
import textwrap

import pytest

from envherd.workers.adapters.env_names import FORMS, factory_for, made_for
from envherd.workers.adapters.meltingpot import factory as meltingpot_factory
from envherd.workers.adapters.meltingpot.factory import MeltingPotFactory
from envherd.workers.adapters.named import (
    NamedFactory,
    PettingZooFactory,
    named_callable,
)
from envherd.workers.errors import FactoryError
from tests.extras import needs

KNOWN = {
    "meltingpot:clean_up": MeltingPotFactory("clean_up"),
    "gymnasium:CartPole-v1": NamedFactory("gymnasium", "CartPole-v1"),
    # The highest version, as `gymnasium.make` takes it.
    "gymnasium:CartPole": NamedFactory("gymnasium", "CartPole-v1"),
    "gymnasium_vec:CartPole:3": NamedFactory(
        "gymnasium_vec", "CartPole-v1", num_rows=3
    ),
    "dm_control:cartpole/balance": NamedFactory("dm_control", "cartpole/balance"),
    "pettingzoo:mpe2.simple_spread_v3": PettingZooFactory("mpe2.simple_spread_v3"),
    "pettingzoo:sisl/multiwalker-v9": PettingZooFactory("sisl/multiwalker-v9"),
    "pettingzoo:sisl/multiwalker": PettingZooFactory("sisl/multiwalker-v9"),
    "gymnasium_vec:CartPole-v1": NamedFactory("gymnasium_vec", "CartPole-v1"),
    "gymnasium_vec:gymnasium.envs:CartPole-v1:3": NamedFactory(
        "gymnasium_vec", "gymnasium.envs:CartPole-v1", num_rows=3
    ),
    "envpool:CartPole-v1:2": NamedFactory("envpool", "CartPole-v1", num_rows=2),
    "envpool:CartPole:2": NamedFactory("envpool", "CartPole-v1", num_rows=2),
    "python:envherd.workers.testing:CountingEnv": NamedFactory(
        "python", "envherd.workers.testing:CountingEnv"
    ),
    "python:collections:Counter.fromkeys": NamedFactory(
        "python", "collections:Counter.fromkeys"
    ),
    "torchrl:torchrl.envs:GymEnv": NamedFactory("torchrl", "torchrl.envs:GymEnv"),
    # Without a family.
    "CartPole-v1": NamedFactory("gymnasium", "CartPole-v1"),
    "clean_up": MeltingPotFactory("clean_up"),
    "cartpole/balance": NamedFactory("dm_control", "cartpole/balance"),
    "sisl/multiwalker-v9": PettingZooFactory("sisl/multiwalker-v9"),
    "collections:Counter.fromkeys": NamedFactory(
        "python", "collections:Counter.fromkeys"
    ),
}

#: Unknown name -> texts that the error message must contain.
UNKNOWN = {
    "meltingpot:clean_pu": ["'clean_pu'", "clean_up"],
    "gymnasium:CartPol-v1": ["'CartPol-v1'", "CartPole-v1"],
    "gymnasium:CartPol": ["CartPole-v1"],
    "gymnasium:no_such_package_x:Thing-v0": ["no_such_package_x"],
    "dm_control:cartpole/balanc": ["cartpole/balance"],
    "dm_control:cartpole": ["DOMAIN/TASK", "cartpole/balance"],
    "pettingzoo:sisl/multiwalker-v8": ["sisl/multiwalker-v9"],
    "pettingzoo:multiwalker-v9": [
        "expected pettingzoo:ID-OR-MODULE of an installed env",
        "sisl/multiwalker-v9",
    ],
    "pettingzoo:mpe2.no_such_env_x": ["mpe2.no_such_env_x", "ModuleNotFoundError"],
    "pettingzoo:json": ["parallel_env", "mpe2.simple_spread_v3"],
    "envpool:CartPole-v1:many": ["number of rows", "'many'"],
    "gymnasium_vec:CartPole-v9:3": ["'CartPole-v9'", "CartPole-v1"],
    "envpool:CartPole-v9": ["'CartPole-v9'", "CartPole-v1"],
    "python:envherd.workers.testing:CountingEmv": ["CountingEnv"],
    "python:no_such_module_x:make": ["no_such_module_x", "ModuleNotFoundError"],
    "python:json": ["MODULE:CALLABLE"],
    "python:json:": ["MODULE:CALLABLE"],
    "python:sys:path": ["callable", "list"],
    "torchrl:torchrl.envs:GymEnvv": ["GymEnv"],
    "gym:CartPole-v1": list(FORMS),
    "gymnasum:CartPole-v1": ["Did you mean gymnasium:"],
    "clean_pu": ["Did you mean clean_up"],
    "CartPole-v9": ["Did you mean CartPole-v1", *FORMS],
    "no_such_module_x:make": [
        *FORMS,
        "got neither a family nor a module 'no_such_module_x'",
    ],
    "json:Loads-v0": [
        *FORMS,
        "got a module and no callable",
        "write gymnasium:json:Loads-v0",
    ],
    "meltingpot:": list(FORMS),
    "json": ["Write json:CALLABLE."],
    "json.py": ["Write json:CALLABLE."],
    "./json/decoder.py": ["Write json.decoder:CALLABLE."],
    "./json.py:loads": ["Write json:loads."],
    "json.loads": ["Write json:loads."],
    "": list(FORMS),
}

needs_dm_control = pytest.mark.slow  # the imports of these tests take over a second


#: Prefix of names -> the extra that installs their package.
EXTRAS = {
    "dm_control": "dm-control", "envpool": "envpool", "gymnasium": "gymnasium", "meltingpot": "meltingpot",
    "clean_": "meltingpot", "CartPole": "gymnasium", "pettingzoo": "pettingzoo", "torchrl": "torchrl",
    "cartpole/": "dm-control", "sisl/": "pettingzoo",
}  # fmt: skip


def _cases(names: list[str]) -> list:
    heavy = ("dm_c", "cartpole/", "torchrl")
    return [
        pytest.param(
            name,
            marks=[
                *(
                    needs(extra)
                    for prefix, extra in EXTRAS.items()
                    if name.startswith(prefix)
                ),
                *([needs_dm_control] if name.startswith(heavy) else []),
            ],
        )
        for name in names
    ]


@pytest.mark.parametrize("name", _cases(list(KNOWN)))
def test_name_becomes_picklable_factory(name):
    factory = factory_for(name)
    assert factory == KNOWN[name]
    assert pickle.loads(pickle.dumps(factory)) == factory


@needs("gymnasium", "cli")
@pytest.mark.slow
def test_names_are_listed_and_a_missing_family_is_named_only_if_requested(monkeypatch):
    from typer.testing import CliRunner

    from envherd.executor.cli.app import app

    runner = CliRunner()
    done = runner.invoke(app, ["list", "gymnasium", "cartpole-v1"])
    assert done.exit_code == 0
    assert "gymnasium:CartPole-v1" in done.output.split()
    assert all(
        factory_for(name) for name in done.output.split() if "phys2d" not in name
    )
    # Makes `import pettingzoo` raise ImportError.
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    done = runner.invoke(app, ["list"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert "gymnasium:CartPole-v1" in done.stdout.split()
    done = runner.invoke(app, ["list", "pettingzoo"])
    assert done.exit_code == 2
    assert "pip install 'envherd[pettingzoo]'" in done.stderr


@needs("atari", "minigrid")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ALE/Pong-v5", "gymnasium:ale_py:ALE/Pong-v5"),
        ("gymnasium:ALE/Pong-v5", "gymnasium:ale_py:ALE/Pong-v5"),
        ("MiniGrid-Empty-5x5-v0", "gymnasium:minigrid:MiniGrid-Empty-5x5-v0"),
        ("gymnasium_vec:ALE/Pong-v5:2", "gymnasium_vec:ale_py:ALE/Pong-v5:2"),
    ],
)
def test_envs_that_other_packages_register_are_found(name, expected):
    assert factory_for(name) == factory_for(expected)
    # Workers import what registers the env.
    assert factory_for(name).name.startswith(("ale_py:", "minigrid:"))
    assert factory_for(name)().unwrapped.spec.id in expected.split(":")


@pytest.mark.parametrize("name", _cases(list(UNKNOWN)))
def test_unknown_name_is_refused_with_what_is_known(name):
    with pytest.raises(FactoryError) as caught:
        factory_for(name)
    for expected in UNKNOWN[name]:
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("meltingpot:clean_up", (MeltingPotFactory("clean_up", max_steps=5), {})),
        (
            "CartPole-v1",
            (NamedFactory("gymnasium", "CartPole-v1"), {"max_episode_steps": 5}),
        ),
    ],
)
def test_episodes_are_limited_by_a_field_or_an_argument(name, limit):
    factory, kwargs = limit
    assert made_for(name, {"g": 9.8}, 5) == (factory, {"g": 9.8, **kwargs})


def test_families_without_a_limit_are_refused():
    with pytest.raises(
        FactoryError,
        match="expected an env of one of meltingpot, gymnasium, pettingzoo, python",
    ):
        made_for("gymnasium_vec:CartPole-v1", None, 5)


@needs("pettingzoo")
def test_an_id_of_pettingzoo_may_have_no_namespace(monkeypatch):
    from pettingzoo import EnvSpec, parallel_registry

    monkeypatch.setitem(
        parallel_registry,
        "mine-v0",
        EnvSpec("mine-v0", "mpe2.simple_spread_v3:parallel_env"),
    )
    assert factory_for("pettingzoo:mine-v0")(max_cycles=2).possible_agents == [
        "agent_0",
        "agent_1",
        "agent_2",
    ]


@needs("pettingzoo")
def test_only_envs_that_must_know_are_notified_of_frames():
    assert factory_for("gymnasium:CartPole-v1", with_frames=True) == NamedFactory(
        "gymnasium", "CartPole-v1", render_mode="rgb_array"
    )
    spread = "mpe2.simple_spread_v3"
    assert factory_for(f"pettingzoo:{spread}", with_frames=True) == PettingZooFactory(
        spread, "rgb_array"
    )
    assert factory_for("meltingpot:clean_up", with_frames=True) == MeltingPotFactory(
        "clean_up"
    )


def test_a_module_that_raises_is_reported_with_its_exception(tmp_path, monkeypatch):
    (tmp_path / "raises_on_import.py").write_text("raise OSError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        FactoryError, match="importing raises_on_import raised OSError: no such device"
    ):
        factory_for("python:raises_on_import:make")


def test_envs_of_other_packages_are_registered_by_importing_them(tmp_path, monkeypatch):
    (tmp_path / "registers_an_env.py").write_text(
        textwrap.dedent("""
            import gymnasium
            gymnasium.register("OfAnotherPackage-v3", "gymnasium.envs.classic_control.cartpole:CartPoleEnv")
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    factory = factory_for("gymnasium:registers_an_env:OfAnotherPackage-v3")
    assert factory == NamedFactory("gymnasium", "registers_an_env:OfAnotherPackage-v3")
    assert factory().spec.id == "OfAnotherPackage-v3"


def test_a_missing_package_says_what_to_install(monkeypatch):
    # Makes `import gymnasium` raise ImportError.
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(FactoryError, match=r"pip install 'envherd\[gymnasium\]'"):
        factory_for("gymnasium:CartPole-v1")


@pytest.mark.parametrize("roles", [None, ("default",)])
def test_without_melting_pot_its_factory_says_so_when_it_is_called(monkeypatch, roles):
    monkeypatch.setattr(meltingpot_factory, "installed", lambda: None)
    monkeypatch.setattr(meltingpot_factory, "_config_module", lambda kind: None)
    factory = MeltingPotFactory("clean_up", roles=roles)
    with pytest.raises(FactoryError, match="expected a package `meltingpot`, got none"):
        factory()


@pytest.mark.slow
def test_torchrl_names_refuse_envs_of_other_families():
    with pytest.raises(
        FactoryError,
        match=r"expected a TorchRL env, got envherd\.workers\.testing\.envs\.CountingEnv",
    ):
        NamedFactory("torchrl", "envherd.workers.testing:CountingEnv")()


def test_callables_are_found_inside_classes(tmp_path, monkeypatch):
    (tmp_path / "has_a_class.py").write_text(
        textwrap.dedent("""
            class Envs:
                @staticmethod
                def make():
                    return 7
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert named_callable("has_a_class:Envs.make", "--policy")() == 7
    with pytest.raises(
        FactoryError, match=r"has_a_class has no .Envs\.mak.*Did you mean make"
    ):
        named_callable("has_a_class:Envs.mak", "--policy")
