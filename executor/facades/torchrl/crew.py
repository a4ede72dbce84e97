"""The crew runs the envs of a TorchRL facade in worker processes.

It calls methods of the hosted by name (`tell`), and steps all envs through the slab if possible (`step_slab`).
Guarantees: an env that raises is an `EnvError` after all others have answered.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.facades.torchrl.worker import Call, HostedFactory, dumps, loads
from envherd.executor.options import ExecutorOptions
from envherd.executor.parallel import ParallelEnv
from envherd.executor.processes.error_messages import Frame, env_error
from envherd.executor.protocol.env_states import Event
from envherd.executor.protocol.fast import FastStep, compile_step
from envherd.executor.sending.blueprint import choose_workers
from envherd.workers.build import describe, modules_of, pickle_factory
from envherd.workers.errors import ActionError
from envherd.workers.protocol import Op

#: Additional modules that a helper process imports if they are installed, by a module that the factories refer to. With
#: groups of agents, specs make tensordicts, and these import pandas and h5py.
_BACKENDS = {
    "torchrl.envs.libs.gym": (
        "gymnasium",
        "stable_baselines3.common.vec_env.base_vec_env",
    ),
    "torchrl.envs.libs.meltingpot": (
        "envherd.workers.adapters.meltingpot.build",
        "pandas",
        "h5py",
    ),
}

#: Keeps TensorBoard, which Stable-Baselines3 imports, from importing TensorFlow; imported before anything else.
_LIGHT = "envherd.workers.adapters.light_tensorboard"


class HostedEnvs(ParallelEnv):
    """Hosted envs in worker processes; envs of one factory may have different specs.

    Args:
        factories: one callable per env.
        env_kwargs: keyword arguments of each call.
        num_processes: None for one per usable core, at most one per env.
        options: of the executor.

    Attributes:
        is_dense: whether `step_slab` can be used.
        ways: how it steps the envs: "direct", or TorchRL's own code and why.
    """

    _check_specs = staticmethod(lambda *_: None)
    #: Bool `[N]`, the envs whose workers were lost in the latest `step_slab`; None for none.
    lost: torch.Tensor | None = None

    def __init__(
        self,
        factories: Sequence[Callable[..., Any]],
        env_kwargs: Sequence[dict[str, Any]],
        num_processes: int | None,
        options: ExecutorOptions,
    ) -> None:
        num_workers = choose_workers(len(factories), num_processes, "num_processes")
        by_id = {
            # One for each function: envs of one factory are known to be built by equal calls.
            id(factory): _hosted_factory(factory, options)
            for factory in factories
        }
        super().__init__(
            [by_id[id(factory)] for factory in factories],
            num_workers=None if options.alone else num_workers,
            env_kwargs=list(env_kwargs),
            options=options,
        )
        # In TorchRL the env decides whether it may be stepped before a reset.
        self._engine.allow_steps()
        self.ways = tuple(
            dict.fromkeys(str(spec.metadata["way"]) for spec in self.specs)
        )
        self.is_dense = bool(self.spec.metadata["is_dense"]) and all(
            spec == self.spec for spec in self.specs
        )

    def tell(self, env_ids: Sequence[int], calls: Sequence[Call]) -> list[Any]:
        """Make a different call to each env; return the results in that order.

        With `on_env_error="interrupt"`, a reset that raises is made again with a new instance of the env.

        Raises:
            EnvError: an env raised; all others have made their calls.
            WorkerLost, WorkerTimeout, Busy, Closed.
        """
        with self._engine.guard:
            self._replace_lost(env_ids, calls)
            answers = self._engine.ask(
                "each",
                list(env_ids),
                name="perform",
                args=tuple(dumps(call) for call in calls),
            )
        results = {}
        faults = {}
        for env_id in env_ids:
            has_worked, value = loads(answers[env_id]["plain"])
            if not has_worked:
                faults[env_id] = {**value, "env_id": env_id}
            results[env_id] = value
        if faults:
            again = {
                env_id: call
                for env_id, call in zip(env_ids, calls, strict=True)
                if env_id in faults
            }
            self._rebuild(faults, again)
            # A new instance may raise as well: `may_interrupt` counts how often.
            results |= zip(again, self.tell([*again], [*again.values()]), strict=True)
        return [*results.values()]

    def _rebuild(self, faults: Mapping[int, Frame], calls: Mapping[int, Call]) -> None:
        """Put new instances in the places of envs whose resets have raised, if the options allow it.

        Raises:
            EnvError: they do not, or other calls have raised.
        """
        pool = self._pool
        worker_id = int(pool.worker_of[min(faults)])
        are_resets = all(call.name == "reset" for call in calls.values())
        is_interrupted = (
            self._engine.flights.losses.may_interrupt(faults) and are_resets
        )
        error = env_error(
            [*faults.values()],
            worker_id,
            pool.pid_of(worker_id),
            pool.gpu_of(worker_id),
            is_interrupted=is_interrupted,
        )
        if not is_interrupted:
            raise error
        self._engine.flights.losses.log(error, len(faults))
        with self._engine.guard:
            pool.send_calls(faults)
            self._engine.reset_envs(np.array([*faults], np.int64))

    def _replace_lost(self, env_ids: Sequence[int], calls: Sequence[Call]) -> None:
        """Replace lost workers all of whose envs will be reset, if the options allow it; else keep their loss."""
        if not self._pool.lost or self._engine.options.on_worker_loss != "restart":
            return
        reset = {
            env_id
            for env_id, call in zip(env_ids, calls, strict=True)
            if call.name == "reset"
        }
        for worker_id in list(self._pool.lost):
            if reset.issuperset(self._pool.blueprint.blocks[worker_id]):
                self._pool.begin_restart(worker_id)

    def step_slab(
        self,
        td: TensorDictBase,
        op: Op,
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Step all envs through the slab.

        Returns:
            `(next, root)`: batches `[N]` with the leaves under their flat names; the root is None unless the op is
            STEP_RESET, and shares its leaves with `next` if no env was reset.
        """
        engine = self._engine
        with engine.guard:
            # In TorchRL the caller decides whether to reset envs that have ended.
            if not engine.states.are_running():
                engine.states.move(engine.all_ids, Event.IS_ALLOWED)
            try:
                following, root = engine.step_all(td, op)
            except ActionError:  # the dtype may differ from the spec's: TorchRL casts when it copies to its buffers
                following, root = engine.step_all(self._cast(td), op)
            self.lost = None
            if engine.positions.has_interrupted and engine.positions.interrupted.any():
                self.lost = self._end_lost(following)
            return following, root

    def compile_steps(self, shells: Any) -> dict[Op, FastStep]:
        """Return steps that make TorchRL's batches directly from the slab; none if that is not possible.

        Args:
            shells: `data.Shells` for batches of all envs.
        """
        engine = self._engine
        is_plain = shells.is_on_cpu and tuple(engine.batch_size) == shells.batch_size
        if engine.plain.step or engine.positions.has_interrupted or not is_plain:
            return {}
        steps = shells.over(engine.batches.groups[0])
        return {
            op: compile_step(engine, op, steps, shells.device)
            for op in (Op.STEP, Op.STEP_RESET)
        }

    def _end_lost(self, following: TensorDictBase) -> torch.Tensor:
        """Mark the rows of envs whose worker was lost as truncated (and not terminated); return them, bool `[N]`."""
        lost = torch.from_numpy(self._engine.positions.interrupted[:, 0].copy())
        for leaf in self.spec.observation:
            # The repeated row may belong to the previous episode.
            if leaf.key[0].startswith("done:"):
                following.get(leaf.key[0])[lost] = (
                    leaf.key[0].rpartition("/")[2].split(":")[-1] != "terminated"
                )
        return lost

    def _cast(self, td: TensorDictBase) -> TensorDictBase:
        inputs = td.select(*(leaf.key for leaf in self.spec.action), strict=False)
        for leaf in self.spec.action:
            value = inputs.get(leaf.key, None)
            if value is not None:
                inputs.set(leaf.key, value.to(getattr(torch, leaf.dtype)))
        return inputs


def _hosted_factory(
    factory: Callable[..., Any],
    options: ExecutorOptions,
) -> HostedFactory:
    modules = modules_of(factory)
    backends = [
        name
        for module in modules
        for name in _BACKENDS.get(module, ())
        if find_spec(name.partition(".")[0]) is not None
    ]
    return HostedFactory(
        pickle_factory(factory),
        describe(factory),
        (_LIGHT, *modules, *backends),
        options.worker_threads,
    )
