"""Mistakes of a first hour: each gets one error that names what to write instead, and none passes in silence."""

import functools
import io
import logging
import re
import sys
import traceback
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import envherd
from envherd import (
    ActionError,
    Collector,
    EnvError,
    ExecutorOptions,
    FactoryError,
    ParallelEnv,
    SerialEnv,
    WorkerLost,
    WorkerTimeout,
)
from envherd.executor.start.zygote import without_own_frames
from envherd.executor.testing import ContractViolation, check_env_contract
from envherd.gymnasium import AsyncVectorEnv
from envherd.workers.testing import CountingEnv
from tests.envs.breaking_envs import FaultyEnv
from tests.extras import needs, skip_without

serial: Any = SerialEnv  # these calls have wrong types
collector: Any = Collector
package: Any = envherd
vector: Any = AsyncVectorEnv
make_cartpole = functools.partial(gymnasium.make, "CartPole-v1")
# Its observations have another shape.
make_mountain_car = functools.partial(gymnasium.make, "MountainCar-v0")
dying = functools.partial(FaultyEnv, "segfault")


class OldReset(gymnasium.Env):
    """An env of gym before 0.26."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros(2, np.float32)


class Outside(OldReset):
    """An env whose observations leave their space."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super(OldReset, self).reset(seed=seed)
        self.left = 3
        return np.zeros(2, np.float32), {}

    def step(self, _action: Any) -> Any:
        self.left -= 1
        return np.full(2, 7, np.float32), 0.0, self.left == 0, False, {}


class Raises(Outside):
    """An env that raises."""

    def step(self, _action: Any) -> Any:
        raise ValueError


class Argmax(nn.Module):
    """A network of a user, which takes tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x).argmax(-1)


def reset_of(kind: Any) -> None:
    with SerialEnv(1, kind) as env:
        env.reset()


def lacks_atari() -> Any:
    raise gymnasium.error.NamespaceNotFound(
        "Namespace ALE not found. Have you installed the proper package for ALE?"
    )


def lacks_box2d() -> Any:
    raise gymnasium.error.DependencyNotInstalled(
        'Box2D is not installed, you can install it by run `pip install "gymnasium[box2d]"`'
    )


def model() -> Any:
    """Return a model of Stable-Baselines3."""
    skip_without("sb3")
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", make_cartpole(), device="cpu")


def sb3_batch() -> Any:
    skip_without("sb3")
    return envherd.sb3.SubprocVecEnv([make_cartpole])


WRAP = r"Wrap it: TensorDictModule\(policy, in_keys=\['observation'\], out_keys=\['action'\]\)"
WRAP_MODEL = r"lambda td: td\.set\('action', torch\.as_tensor\(model\.predict\("
GPU = "expected policy_device as a device of this machine, got 'cuda', but there is no GPU that torch can use"
#: What was tried -> (call of an executor of four CartPoles, its error, a part of message and notes).
MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "a factory with an argument": (
        lambda _: serial(2, lambda _i: make_cartpole()),
        FactoryError,
        r"Factories get no arguments but those of env_kwargs=",
    ),
    "Auto": (
        lambda _: serial(2, CountingEnv, num_workers="Auto"),
        ValueError,
        "an int of at least 1, 'auto' or None",
    ),
    "an action as floats": (
        lambda env: env.step(env.current().set("action", torch.zeros(4))),
        ActionError,
        r"action expected int64, got float32 .*Pass action\.to\(torch\.int64\)\.",
    ),
    "both batches of a step": (
        lambda env: env.rand_action(env.step_and_maybe_reset(env.rand_action())),
        TypeError,
        r"got a tuple\. step_and_maybe_reset returns two batches: td, root = env\.step_and_maybe_reset\(td\)\.",
    ),
    "a policy for envs of one shape": (
        lambda _: serial(2, [make_cartpole, make_mountain_car]).rollout(
            2, lambda td: td["observation"]
        ),
        RuntimeError,
        r"different shapes, .*td\.unbind\(0\) returns the rows; what you write",
    ),
    "no action": (
        lambda env: env.step(env.current()),
        ActionError,
        r"expected a key \('action',\), got none among \['done', .* The policy must set it\.",
    ),
    "a one-hot action": (
        lambda env: env.step(env.current().set("action", torch.eye(2)[[0, 1, 0, 1]])),
        ActionError,
        r"the index of a one-hot action: action\.argmax\(-1\)",
    ),
    "a bare mask": (
        lambda env: env.reset(torch.ones(4, dtype=torch.bool)),
        TypeError,
        r"TensorDict\({'_reset': mask}",
    ),
    "a mask of another length": (
        lambda env: env.reset(
            TensorDict({"_reset": torch.ones(3, dtype=torch.bool)}, [3])
        ),
        ValueError,
        r"expected a bool mask of shape \(4,\) or \(4, 1\), got bool \(3,\)\. .*TensorDict\({'_reset': mask}",
    ),
    "a network of torch": (
        lambda env: env.rollout(3, nn.Sequential(nn.Linear(4, 2))),
        TypeError,
        WRAP,
    ),
    "a key that the batch lacks": (
        lambda env: env.rollout(
            3, TensorDictModule(nn.Linear(4, 2), ["obs"], ["action"])
        ),
        KeyError,
        r"called with a batch of these keys: .*observation",
    ),
    "a key that the batch lacks, next to a text": (
        lambda _: serial(
            1,
            type(
                "Reads",
                (Outside,),
                {
                    "observation_space": gymnasium.spaces.Dict(
                        sign=gymnasium.spaces.Text(8)
                    ),
                    "reset": lambda *_, **_options: ({"sign": "left"}, {}),
                },
            ),
        ).rollout(3, lambda td: td["place"]),
        KeyError,
        r"called with a batch of these keys: .*sign",
    ),
    "a breakpoint that is left": (
        lambda _: serial(
            1,
            type(
                "Stops",
                (Outside,),
                {"step": lambda *_: exec("import bdb; raise bdb.BdbQuit")},
            ),
        ).rollout(3),
        EnvError,
        r"raised BdbQuit .* A debugger needs envs in this process: SerialEnv\.",
    ),
    "a network of one's own": (lambda env: env.rollout(3, Argmax()), TypeError, WRAP),
    "a list of another length": (
        lambda env: env.set("x", [1, 2]),
        ValueError,
        r"pass \[value\] \* 4",
    ),
    "infos that are dropped": (
        lambda env: env.infos(),
        ValueError,
        r'options=ExecutorOptions\(infos="plain"\)',
    ),
    "infos by name": (
        lambda _: ExecutorOptions(infos=("lives",)),  # type: ignore[arg-type]
        ValueError,
        r"got \('lives',\)\. Write infos=\{NAME: int\}",
    ),
    "a class of no family": (
        lambda _: serial(1, dict),
        FactoryError,
        r"got builtins\.dict\. Known are classes of .*dm_env, .*envherd\.register\(YourEnv, YourAdapter\)",
    ),
    "an out that is too short": (
        lambda env: env.rollout(6, out=TensorDict({}, [4, 4])),
        ValueError,
        r"expected out of at least 6 steps \(max_steps\), got 4",
    ),
    "reset of old gym": (
        lambda _: reset_of(OldReset),
        EnvError,
        r"the API of gym before 0\.26\. Wrap the env in the factory: shimmy\.GymV21CompatibilityV0\(env=env\)",
    ),
    "the whole checkpoint": (
        lambda env: env.load_state_dict({"policy": {}, "env": {}}),
        ValueError,
        r"none of env 0 among \['env', 'policy'\]\. Pass what state_dict\(\) returned",
    ),
    "observations outside their space": (
        lambda _: check_env_contract(Outside, num_steps=10),
        ContractViolation,
        r"expected observation in \[0\.0, 1\.0\], got 7\.0",
    ),
    "two envs that raise": (
        lambda _: serial(2, Raises).rollout(1),
        EnvError,
        r"raised ValueError \(env 0, .*Envs \[1\] raised too\. The other envs go on; reset these to use them again\.",
    ),
    "a class of a facade": (
        lambda _: exec("from envherd import SubprocVecEnv"),
        ImportError,
        r"envherd\.sb3 import SubprocVecEnv\.",
    ),
    "a base class of SB3": (
        lambda _: exec("from envherd import VecEnv"),
        ImportError,
        r"envherd\.sb3 import SubprocVecEnv\.",
    ),
    "a class of Gymnasium": (
        lambda _: package.AsyncVectorEnv,
        ImportError,
        r"envherd\.gymnasium import AsyncVectorEnv\.",
    ),
    "a function of Gymnasium": (
        lambda _: exec("from envherd import make_vec"),
        ImportError,
        r"envherd\.gymnasium import make_vec\.",
    ),
    "a base class of TorchRL": (
        lambda _: exec("from envherd import EnvBase"),
        ImportError,
        r"envherd\.torchrl import ParallelEnv\.",
    ),
    "workers by another name": (
        lambda _: vector([make_cartpole], workers=2),
        TypeError,
        r"Did you mean num_workers\?",
    ),
    "nworkers": (
        lambda _: vector([make_cartpole], nworkers=2),
        TypeError,
        r"Did you mean num_workers\?",
    ),
    "an autoreset mode that there is not": (
        lambda _: vector([make_cartpole], autoreset_mode="same"),
        ValueError,
        r"one of 'NextStep', 'SameStep', 'Disabled', got 'same'\.",
    ),
    "Atari without its package": (
        lambda _: serial(1, lacks_atari),
        FactoryError,
        r'pip install "envherd\[atari\]"\. If an',
    ),
    "Box2D without its package": (
        lambda _: serial(1, lacks_box2d),
        FactoryError,
        r'pip install "envherd\[box2d\]"\.',
    ),
    "an executor as an env": (
        lambda _: serial(1, lambda: serial(1, CountingEnv)),
        FactoryError,
        r"expected one env, got a SerialEnv: an executor cannot be an env\.",
    ),
    "a vector env of SB3's facade as an env": (
        lambda _: serial(1, sb3_batch),
        FactoryError,
        r"got a SubprocVecEnv: an executor cannot be an env\.",
    ),
    "no factories": (
        lambda _: serial([]),
        ValueError,
        "at least one factory, got an empty list",
    ),
    "no functions": (
        lambda _: vector([]),
        ValueError,
        "AsyncVectorEnv failed: .* at least one function, got an empty list",
    ),
    "the folder of another Python": (
        lambda _: envherd.InPython(sys.prefix, "a:b"),
        FactoryError,
        re.escape(f"Did you mean {sys.prefix}/bin/python?"),
    ),
    "the number of actions": (
        lambda env: env.action_spec.n,
        AttributeError,
        r"env\.action_spec\[0\]\.domain\.n\.",
    ),
    "the shape of an observation": (
        lambda env: env.observation_spec.shape,
        AttributeError,
        r"_spec\[0\]\.shape\.",
    ),
    "a policy of two arguments": (
        lambda env: env.rollout(2, lambda obs, info: 0),
        TypeError,
        WRAP,
    ),
    "a network of two arguments": (
        lambda env: env.rollout(2, nn.Bilinear(4, 4, 2)),
        TypeError,
        WRAP,
    ),
    "a model of SB3": (lambda env: env.rollout(2, model()), TypeError, WRAP_MODEL),
    "the policy of a model of SB3": (
        lambda env: env.rollout(2, model().policy),
        AssertionError,
        WRAP_MODEL,
    ),
    "the method of a model of SB3": (
        lambda env: env.rollout(2, model().predict),
        RuntimeError,
        WRAP_MODEL,
    ),
    "a model of SB3 to evaluate": (
        lambda _: envherd.evaluate(model(), make_cartpole),
        TypeError,
        WRAP_MODEL,
    ),
    "what PufferLib's vector envs have": (
        lambda env: env.driver_env,
        AttributeError,
        r"observation_spec and action_spec describe them\.$",
    ),
    "how PufferLib's loops begin": (
        lambda env: env.async_reset(),
        AttributeError,
        r"Use reset\(\)",
    ),
    "a misspelt attribute": (
        lambda env: env.num_env,
        AttributeError,
        r"no attribute 'num_env'\. Did you mean num_envs\?",
    ),
    "a misspelt method": (
        lambda env: env.rolout(3),
        AttributeError,
        r"Did you mean rollout\?",
    ),
    "a misspelt name": (
        lambda _: package.ParalelEnv,
        AttributeError,
        r"Did you mean ParallelEnv\?",
    ),
    "a name that is like no other": (
        lambda _: package.nothing_like_it,
        AttributeError,
        r"has no attribute 'nothing_like_it'$",
    ),
    "a misspelt facade": (
        lambda _: package.sb33,
        AttributeError,
        r"Did you mean sb3\?",
    ),
}
if not torch.cuda.is_available():
    MISTAKES["a GPU that is not there"] = (
        lambda env: collector(
            env, nn.Linear(4, 2), frames_per_batch=8, policy_device="cuda"
        ),
        ValueError,
        GPU,
    )


@pytest.fixture(scope="module")
def cartpoles():
    with SerialEnv(4, make_cartpole, seed=0) as env:
        yield env


@pytest.fixture
def env(cartpoles):
    cartpoles.reset()
    return cartpoles


@needs("gymnasium")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_what_to_write_instead(env, name):
    call, error, text = MISTAKES[name]
    with pytest.raises(error) as caught:
        call(env)
    whole = "".join(traceback.format_exception_only(caught.value))
    assert re.search(text, whole), whole
    assert whole.count("Did you mean") <= 1


@needs("gymnasium")
def test_a_wrong_call_inside_of_a_policy_has_no_note(env):
    with pytest.raises(TypeError, match="positional argument") as caught:
        env.rollout(2, lambda _td: make_cartpole.func())
    assert not hasattr(caught.value, "__notes__")


@needs("gymnasium")
def test_pictures_that_no_env_has_are_a_warning(env):
    with pytest.warns(
        UserWarning, match="no env has a picture.*render_mode='rgb_array'"
    ):
        assert env.render() == [None] * 4


@needs("sb3")
def test_one_function_in_place_of_a_list_is_refused():
    from envherd.gymnasium import AsyncVectorEnv
    from envherd.sb3 import SubprocVecEnv

    for kind in (AsyncVectorEnv, SubprocVecEnv):
        facade: Any = kind
        with pytest.raises(
            TypeError, match=rf"{kind.__name__} failed: .*Write \[make_env\] \* 8\."
        ):
            facade(make_cartpole)


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_late_worker_is_reported_with_both_remedies():
    options = ExecutorOptions(step_timeout_s=0.2)
    with (
        ParallelEnv(1, lambda: FaultyEnv("sleep"), options=options) as env,
        pytest.raises(WorkerTimeout) as caught,
    ):
        env.rollout(2)
    sentences = (
        r"Raise ExecutorOptions\.step_timeout_s .*on_worker_loss='restart'\) replaces lost workers\.\n"
        r"It was stuck in"
    )
    assert re.search(sentences, caught.value.message)


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_lost_worker_is_printed_once_and_without_own_frames(caplog):
    with (
        caplog.at_level(logging.WARNING, "envherd"),
        ParallelEnv(2, dying, num_workers=1) as env,
    ):
        with pytest.raises(WorkerLost) as caught:
            env.rollout(5, break_when_any_done=False)
        # At once, while other envs may still step; the error has the stack.
        (record,) = caplog.records
        assert "ended with SIGSEGV" in record.message
        assert "\n" not in record.message
        printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("Fatal Python error") == 1
    assert "breaking_envs.py" in caught.value.message
    assert "Extension modules" not in printed
    assert "zygote.py" not in printed
    assert caught.value.remote_traceback in caught.value.message


@pytest.mark.slow
@pytest.mark.broken_pool
def test_a_lost_worker_that_is_replaced_is_logged_once(caplog):
    options = ExecutorOptions(on_worker_loss="restart")
    with (
        caplog.at_level(logging.WARNING, "envherd"),
        ParallelEnv(1, dying, num_workers=1, options=options) as env,
    ):
        env.rollout(3, break_when_any_done=False)
    assert caplog.text.count("Fatal Python error") == 1
    assert "zygote.py" not in caplog.text


OWN = '  File "/site/envherd/workers/block/block.py", line 3, in step\n    code\n    ^^^^\n'
USERS = '  File "/home/me/env.py", line 8, in step\n    return 1 / 0\n'
TESTING = '  File "/site/envherd/workers/testing/envs.py", line 8, in step\n'


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            f"Traceback:\n{OWN}{USERS}ZeroDivisionError: x\n",
            f"Traceback:\n{USERS}ZeroDivisionError: x\n",
        ),
        (f"Traceback:\n{OWN}{TESTING}Error\n", f"Traceback:\n{TESTING}Error\n"),
        (f"Traceback:\n{OWN}Error\n", f"Traceback:\n{OWN}Error\n"),
        (
            f'{USERS}{OWN}  File "<string>", line 7 in <module>\n\nExtension modules: numpy (total: 1)\n',
            USERS,
        ),
        ('  File "C:\\me\\envherd\\shm\\slab.py", line 1 in wait\n' + USERS, USERS),
        ("what the env has printed\n", "what the env has printed\n"),
    ],
)
def test_own_frames_are_left_out_where_there_are_others(text, kept):
    assert without_own_frames(text) == kept


@needs("cli")
@pytest.mark.parametrize(("frames", "is_shown"), [(OWN, False), (OWN + USERS, True)])
def test_a_command_shows_the_traceback_of_a_factory_that_began(frames, is_shown):
    from rich.console import Console

    from envherd.executor.cli.commands import complain

    console = Console(file=io.StringIO())
    complain(
        console,
        FactoryError(
            "make_env failed.", remote_traceback=f"Traceback:\n{frames}TypeError: x"
        ),
    )
    assert ("in the process" in console.file.getvalue()) == is_shown


def act_at_random(td: Any) -> Any:
    return td.set("action", torch.randint(0, 2, td.batch_size))


def passes_a_step_again(env: Any, td: Any) -> Any:
    return env.step(act_at_random(td))


def passes_copies(env: Any, td: Any) -> Any:
    return env.step(act_at_random(td.clone()))


def drops_the_root(env: Any, td: Any) -> Any:
    return env.step_and_maybe_reset(act_at_random(td))[0]


def acts_on_what_it_received(env: Any, td: Any) -> Any:
    env.send(act_at_random(td))
    return env.recv()


def takes_next(env: Any, td: Any) -> Any:
    return env.step(act_at_random(td))["next"]


def sends_nothing(env: Any, td: Any) -> Any:
    env.send(act_at_random(td)[:0], env_ids=[])
    return takes_next(env, td)


def updates_one_batch(env: Any, td: Any) -> Any:
    return td.update(env.step_and_maybe_reset(act_at_random(td))[1])


def updates_what_it_received(env: Any, td: Any) -> Any:
    env.send(act_at_random(td))
    received = env.recv(1)
    env.recv()
    env.reset(TensorDict({"_reset": env.current()["done"]}, [2]))
    return (
        received.update(env.current(received["env_ids"]))
        if len(received) == 2
        else env.current()
    )


def changes_the_observation(env: Any, td: Any) -> Any:
    return updates_one_batch(env, td).named_apply(
        lambda key, leaf: leaf / 3 if key == "observation" else leaf, nested_keys=True
    )


def begins_anew(env: Any, td: Any) -> Any:
    return env.step(act_at_random(td)).update(env.reset(seed=1))


def repeats_an_action(env: Any, td: Any) -> Any:
    for _ in range(3):
        td = env.step(td if "next" in td else act_at_random(td))
    return env.reset()


def writes_into_next(env: Any, td: Any) -> Any:
    td["next"] = TensorDict({"hidden": torch.rand(2)}, [2])
    return env.step_and_maybe_reset(act_at_random(td))[1]


STALE = [passes_a_step_again, passes_copies, drops_the_root, acts_on_what_it_received]
FRESH = [
    takes_next,
    sends_nothing,
    updates_one_batch,
    updates_what_it_received,
    changes_the_observation,
    begins_anew,
]
FRESH += [repeats_an_action, writes_into_next]


@pytest.mark.parametrize(
    "make", [SerialEnv, functools.partial(ParallelEnv, num_workers=1)]
)
@pytest.mark.parametrize("others", [make_cartpole, make_mountain_car])
@pytest.mark.parametrize("step", [*STALE, *FRESH])
def test_a_loop_that_acts_on_old_roots_is_reported_once(make, step, others, caplog):
    with (
        caplog.at_level(logging.WARNING, "envherd"),
        make(2, [make_cartpole, others], seed=0) as env,
    ):
        td = env.reset()
        for _ in range(6):
            td = step(env, td)
    assert caplog.text.count("roots that the envs have left") == (step in STALE)


@needs("torchrl")
@pytest.mark.parametrize(
    "step",
    [passes_a_step_again, drops_the_root, takes_next, updates_one_batch, begins_anew],
)
@pytest.mark.long
def test_a_loop_of_torchrl_that_acts_on_old_roots_is_reported_once(step, caplog):
    from torchrl.envs import GymEnv

    from envherd.torchrl import ParallelEnv as Facade

    def act(td: Any) -> Any:
        return td.set(
            "action", nn.functional.one_hot(torch.randint(0, 2, td.batch_size), 2)
        )

    with (
        caplog.at_level(logging.WARNING, "envherd"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(globals(), "act_at_random", act)
        env = Facade(2, functools.partial(GymEnv, "CartPole-v1"), num_processes=1)
        td = env.reset()
        for _ in range(6):
            td = step(env, td)
        env.close()
    assert caplog.text.count("roots that the envs have left") == (step in STALE)
