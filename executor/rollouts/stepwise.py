"""Rollouts for batches on a device: steps are moved one by one and stacked at the end.

Workers cannot write to a device's memory, so a shared storage has no advantage. Instead each step is one transfer, and
the steps are stacked on the learner's device.
Guarantees and result are those of `rollout`, including `interrupted` rows after a loss.
"""

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.batches.grad_mode import outside_inference_mode
from envherd.executor.batches.hand_out import add_side
from envherd.executor.progress import counted
from envherd.executor.protocol.engine import Engine
from envherd.executor.rollouts.policy_state import run_policy
from envherd.executor.rollouts.run import Run
from envherd.shm.slab import input_leaves
from envherd.workers.errors import EnvherdError
from envherd.workers.protocol import Op


class StepwiseRun(Run[Engine]):
    """One rollout in progress; its steps are stacked at the end."""

    def collect(self, max_steps: int, *, auto_reset: bool) -> TensorDictBase:
        """Return `[N, t]`, on the device."""
        engine = self._engine
        self._steps: list[TensorDictBase] = []
        self._root_keys = {
            leaf.key
            for spec in engine.specs
            for leaf in (*spec.observation, *spec.done)
        }
        self._input_keys = {
            leaf.key
            for group in engine.pool.slab.groups
            for leaf in input_leaves(group.spec)
        }

        fresh, cut = engine.reset_for_rollout(auto_reset=auto_reset)
        root = engine.batches.current(engine.all_ids)
        for step in counted(max_steps, "rollout"):
            self._carried.hand_over(root, fresh)
            is_last = self._breaks or step == max_steps - 1
            root = self._step(root, Op.STEP if is_last else Op.STEP_RESET, cut)
            fresh = self._reset_before(self._steps[-1]["next"])
            if self._breaks and (engine.states.needs_reset.any() or cut is not None):
                break
            cut = None
        return self._finished(outside_inference_mode(torch.stack)(self._steps, 1))

    def _step(
        self,
        root: TensorDictBase,
        op: Op,
        cut: np.ndarray | None,
    ) -> TensorDictBase:
        """Make one step; return the root after it."""
        engine = self._engine
        # The policy may write into the root itself.
        kept = root.select(*self._root_keys, strict=False)
        with engine.rolling():
            acted = run_policy(self._policy, root)
        try:
            next_td, after = engine.step_all(acted, op, cut)
        except EnvherdError as error:
            # With a partial batch, the other envs were stepped, and the policy's state follows them.
            if error.partial is not None:
                self._carried.keep(acted)
                self._carried.renew(self._reset_before(error.partial))
            raise
        self._carried.keep(acted)
        if after is None:
            after = next_td.select(*self._root_keys, strict=False)
        self._keep_extras(acted, engine.known)
        # The policy may reuse its memory, as CUDA graphs do.
        kept.update(acted.select(*self._input_keys, strict=False).clone())
        places = engine.positions.places
        for group, own, env_ids in places.by_group(kept, engine.all_ids):
            keys = engine.intakes[group].side_keys
            add_side(own, keys, engine.side_inputs, env_ids.tolist())
        self._steps.append(kept.set("next", next_td))
        if self._callback is not None:
            with engine.rolling():
                self._callback(self._with_next(acted, next_td))
        return after

    def _reset_before(self, next_td: TensorDictBase) -> np.ndarray:
        """Return what was reset after a step, bool `[N]` or `[N, *B]`."""
        return self._engine.batches.ended_parts(
            self._engine.positions.in_root.copy(),
            lambda: next_td,
        )
