"""A script that shares objects with its envs; `test_what_workers_have` runs it.

It prints a JSON object for each start method, case -> result. A worker is replaced between the two steps. The result
is what the script sees in the object, or the advice of the error.
"""

# mypy: ignore-errors

import json
import multiprocessing
import os
import re
import signal
import sys
from multiprocessing import managers, shared_memory

import gymnasium
import numpy as np
import torch

from envherd import ExecutorOptions, FactoryError, ParallelEnv

SPAWN = multiprocessing.get_context("spawn")


class Env(gymnasium.Env):
    observation_space, action_space = (
        gymnasium.spaces.Box(-1, 1, (1,)),
        gymnasium.spaces.Discrete(2),
    )

    def __init__(self, use):
        self.use = use

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, "float32"), {}

    def step(self, action):
        self.use()
        return np.zeros(1, "float32"), 0.0, False, False, {}


def made_with(use):
    return lambda: Env(use)


def shared_by(pairs, start_method):
    """Step two envs with each `use` twice, in two workers; return what each `look` returns afterwards.

    Each worker has one env of each pair. The first worker is replaced between the steps.
    """
    make = [made_with(use) for use, _ in pairs] * 2
    options = ExecutorOptions(
        on_worker_loss="restart",
        start_method=start_method,
        preload=("torch",),
    )
    try:
        with ParallelEnv(len(make), make, num_workers=2, options=options) as env:
            env.rollout(1)
            os.kill(env.statistics().workers[0].pid, signal.SIGKILL)
            env.reset()
            env.reset()
            root = env.current()
            root["action"] = torch.zeros(len(make), dtype=torch.int64)
            env.step(root)
    except FactoryError as error:
        advice = r"multiprocessing.get_context\('spawn'\)|Build it inside"
        return [re.search(advice, str(error)).group()]
    return [look() for _, look in pairs]


def tensor_and_view():
    whole = torch.zeros(3).share_memory_()
    view = whole[1:]
    return lambda: (whole[0].add_(1), view[0].add_(1)), whole.tolist


def parameters():
    layer = torch.nn.Linear(1, 1, bias=False).share_memory()
    layer.weight.data.zero_()
    return lambda: layer.weight.data.add_(1), lambda: layer.weight.tolist()[0]


def queue(context):
    values = context.SimpleQueue()
    return lambda: values.put(1), lambda: [values.get() for _ in range(4)]


def value_and_array(context):
    value, array, event = context.Value("i"), context.Array("d", 2), context.Event()

    def use():
        with value.get_lock():
            value.value += 1
            array[0] += 1
        event.set()

    return use, lambda: [value.value, *array, event.is_set()]


def pipe():
    reader, writer = SPAWN.Pipe(duplex=False)
    return lambda: writer.send(1), lambda: [reader.recv() for _ in range(4)]


def raw_array():
    array = multiprocessing.RawArray("i", 2)
    return lambda: array.__setitem__(0, 7), lambda: list(array)


def both_ways():
    ours, theirs = multiprocessing.Pipe()
    return lambda: theirs.send(1), ours.poll


def manager(start):
    started = start()
    values = started.list()
    return lambda: values.append(1), lambda: (list(values), started.shutdown())[0]


class OwnManager(managers.SyncManager):
    """One that was given a key."""


def with_own_key():
    started = OwnManager(authkey=b"own")
    started.start()
    return started


def named_memory():
    values = shared_memory.ShareableList([0])

    def look():
        # No worker has removed it.
        again = shared_memory.ShareableList(name=values.shm.name)
        found = list(again)
        again.shm.close()
        values.shm.close()
        values.shm.unlink()
        return found

    return lambda: values.__setitem__(0, 7), look


FORK = multiprocessing.get_context("fork")
CASES = {
    "a tensor": (tensor_and_view, ()),
    "parameters": (parameters, ()),
    "a queue": (queue, (SPAWN,)),
    "values": (value_and_array, (SPAWN,)),
    "a pipe": (pipe, ()),
    "a raw array": (raw_array, ()),
    "a manager": (manager, (multiprocessing.Manager,)),
    "a manager with a key": (manager, (with_own_key,)),
    "named memory": (named_memory, ()),
}
REFUSED = {
    "a queue of a fork": (queue, (FORK,)),
    "values of a fork": (value_and_array, (FORK,)),
    "a pipe both ways": (both_ways, ()),
}

if __name__ == "__main__":
    # The default. TorchRL, which the script host has imported, sets another one.
    multiprocessing.set_start_method("fork", force=True)
    for method in ("zygote", "portable"):
        pairs = [make(*args) for make, args in CASES.values()]
        seen = dict(zip(CASES, shared_by(pairs, method), strict=True))
        for name, (make, args) in REFUSED.items():
            (seen[name],) = shared_by([make(*args)], method)
        sys.stdout.write(f"{json.dumps(seen)}\n")
