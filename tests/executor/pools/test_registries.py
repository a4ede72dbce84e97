"""Names of envs that a script or its imports have registered are known in workers."""

import json

import pytest

from envherd.workers.sending import registries
from tests.extras import needs

GYMNASIUM = """
import functools, json, sys, threading
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import WrapperSpec, namespace
from envherd import ExecutorOptions, ParallelEnv, SerialEnv
from envherd.executor.start import zygote

zygote._KEPT_CPU_S = 0.0  # executors share a helper, as they do where imports are slow
sys.path.insert(0, sys.argv[1])
Path(sys.argv[1], "my_envs.py").write_text(
    "import gymnasium\\n"
    "from gymnasium.envs.classic_control import CartPoleEnv\\n"
    "class Env(CartPoleEnv): k = 9\\n"
    "gymnasium.register('Imported-v0', 'my_envs:Env')"
)
import my_envs

class Env(CartPoleEnv):
    def __init__(self, k=1, render_mode=None):
        super().__init__()
        self.k = k

class Vector(gymnasium.vector.SyncVectorEnv):
    def __init__(self, num_envs, **_):
        super().__init__([Env] * num_envs)

lock = threading.Lock()
gymnasium.register("Class-v0", Env, kwargs={"k": 2})
gymnasium.register("Text-v0", f"{__name__}:Env", kwargs={"k": 3}, max_episode_steps=7)
gymnasium.register("Function-v1", lambda **kwargs: Env(4))
gymnasium.register("Wrapped-v0", Env, additional_wrappers=(
    WrapperSpec("TimeLimit", "gymnasium.wrappers.common:TimeLimit", {"max_episode_steps": 5}),))

class Doubled(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    def __init__(self, env, factor=2):
        gymnasium.utils.RecordConstructorArgs.__init__(self, factor=factor)
        super().__init__(env)
        self.k = factor * env.get_wrapper_attr("k")

gymnasium.register("Doubled-v0", f"{__name__}:Env", additional_wrappers=(Doubled.wrapper_spec(factor=7),))
spec = gymnasium.spec("Doubled-v0")
gymnasium.register("CartPole-v1", Env, kwargs={"k": 5})
gymnasium.register("Locked-v0", lambda **kwargs: (lock, Env())[1])
gymnasium.register("Vector-v0", vector_entry_point=Vector)
with namespace("mine"):
    gymnasium.register("Named-v0", Env, kwargs={"k": 6})

def later(name):
    import gymnasium as imported_in_worker
    return imported_in_worker.make(name)

def k_of(kind, name, make=gymnasium.make, **options):
    try:
        with kind(1, functools.partial(make, name), options=ExecutorOptions(**options)) as env:
            return env.call("get_wrapper_attr", "k")[0], env.reset().numel()
    except Exception as error:
        return type(error).__name__, str(error)

found = {}
names = "Imported-v0 Class-v0 Text-v0 Function-v1 Wrapped-v0 Doubled-v0 CartPole-v1 mine/Named-v0"
for name in names.split():
    found[name] = k_of(SerialEnv, name), k_of(ParallelEnv, name)
found["spec"] = k_of(SerialEnv, spec), k_of(ParallelEnv, spec)
for method in ("zygote", "spawn"):
    found[method] = k_of(SerialEnv, "Class-v0"), k_of(ParallelEnv, "Class-v0", later, start_method=method)
with ParallelEnv(1, lambda: gymnasium.make_vec("Vector-v0", 3, vectorization_mode="vector_entry_point")) as env:
    found["vector"] = [1, 3], list(env.reset().batch_size)
print(json.dumps([found, {name: k_of(ParallelEnv, name) for name in ("Locked-v0", "Missing-v0", "Class-v7")}]))
"""

DM_CONTROL = """
import json, sys
from dm_control import suite
from dm_control.suite import cartpole
from envherd import ParallelEnv

@cartpole.SUITE.add("benchmarking")
def added(**kwargs):
    return cartpole.SUITE["balance"](time_limit=3)

def make(domain, name):
    from dm_control import suite as imported_in_worker
    return imported_in_worker.load(domain, name)

def error_of(domain, name):
    try:
        ParallelEnv(1, make, env_kwargs={"domain": domain, "name": name})
    except Exception as error:
        return str(error)

print(json.dumps([error_of("cartpole", "added"), error_of("missing", "task")]))
"""

TORCHRL = """
import json
import gymnasium, torch
from torchrl.data import Unbounded
from torchrl.envs import GymEnv
from torchrl.envs.libs.gym import register_gym_spec_conversion
from envherd.torchrl import ParallelEnv

class Three(gymnasium.Space):
    def __init__(self):
        super().__init__((3,), "float32")

@register_gym_spec_conversion(Three)
def convert(space, **kwargs):
    return Unbounded((3,))

class Env(gymnasium.Env):
    def __init__(self, render_mode=None):
        self.observation_space, self.action_space = Three(), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return torch.zeros(3).numpy(), {}

    def step(self, action):
        return torch.ones(3).numpy(), 0.0, False, False, {}

gymnasium.register("Three-v0", Env, disable_env_checker=True)
env = ParallelEnv(2, lambda: GymEnv("Three-v0"))
print(json.dumps(list(env.rollout(3)["observation"].shape)))
env.close()
"""


@pytest.fixture
def run(script_host, tmp_path):
    def run_script(text):
        folder = tmp_path / "script"
        folder.mkdir()
        done = script_host.run_text(text, str(tmp_path), folder=folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run_script


@needs("gymnasium")
@pytest.mark.long
def test_gymnasium(run):
    known, refused = run(GYMNASIUM)
    assert {name: parallel for name, (_, parallel) in known.items()} == {
        name: here for name, (here, _) in known.items()
    }
    assert known["Imported-v0"][1] == [9, 1]
    assert known["Doubled-v0"][1] == known["spec"][1] == [7, 1]
    assert (
        "cannot be sent to workers: cannot pickle '_thread.lock' object. Register it in a module"
        in refused["Locked-v0"][1]
    )
    for name in ("Missing-v0", "Class-v7"):
        assert "options=ExecutorOptions(preload=('my_envs',))" in refused[name][1]


@needs("dm-control")
@pytest.mark.long
def test_names_of_dm_control_that_a_script_adds_are_refused_with_advice(run):
    task, domain = run(DM_CONTROL)
    assert "Level 'added' does not exist" in task
    assert "Domain 'missing' does not exist" in domain
    for message in (task, domain):
        assert "preload=('my_envs',)" in message


@needs("torchrl", "gymnasium")
@pytest.mark.long
def test_torchrl(run):
    assert run(TORCHRL) == [2, 3, 3]


@needs("gymnasium")
def test_many_names_fit_into_a_sockets_buffer(monkeypatch):
    import gymnasium

    for number in range(2000):
        spec = gymnasium.envs.registration.EnvSpec(
            f"Many{number}-v0", "my_envs:Env", kwargs={"number": number}
        )
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    assert len(registries.collect()) < 100_000
