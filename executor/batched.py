"""The executor's methods: a batch of envs behind the partial-reset protocol.

`ParallelEnv` and `SerialEnv` are this class over a pool of worker processes or over the caller's own.

Guarantees:
- `step` never resets; `reset` touches exactly the rows asked for; `next` holds the true last
  observation; a step of an env that has ended is refused (`ResetNeeded`).
- A refused call changes nothing. After a call that an interrupt broke off, the envs concerned need a reset, and no
  later call returns stale data.
- With `copy=True` the caller owns the data that it gets.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from envherd.executor.assembly import close_in_owner, recycle
from envherd.executor.batches.actions import reset_mask
from envherd.executor.batches.arguments import (
    as_count,
    need_batch,
    need_bools,
    wrong_rows,
)
from envherd.executor.batches.fast_tensordict import get_leaf, set_next
from envherd.executor.keywords import names_right_keyword, no_attribute
from envherd.executor.options import ExecutorOptions
from envherd.executor.pools.base import Pool
from envherd.executor.pools.commands import crossed
from envherd.executor.protocol.engine import Engine
from envherd.executor.protocol.exchange import ENV_IDS, Exchange
from envherd.executor.protocol.fast import FastExchange, compile_step
from envherd.executor.rollouts.policy_state import AddedRows, own_leaves
from envherd.executor.rollouts.rollout import RolloutPolicy, RolloutRunner
from envherd.executor.sending.blueprint import EnvKwargs, MakeEnv, as_factories
from envherd.shm.finalizer import ClosedAtEnd, Finalizer
from envherd.shm.specs import EnvSpec, LeafSpec, OneForEach
from envherd.workers.protocol import Op

if TYPE_CHECKING:
    from envherd.executor.guests.monitor import Statistics


class Parts(NamedTuple):
    """The classes that run an executor's commands.

    Attributes:
        engine: `Engine`, or a class with the methods that are used here.
        exchange: for `send` and `recv`.
        run: makes rollouts; None for those of `RolloutRunner`.
    """

    engine: Any = Engine
    exchange: type[Exchange] = Exchange
    run: Any = None


class BatchedEnv(ClosedAtEnd):
    """A batch of envs; the base of `ParallelEnv` and `SerialEnv`.

    Attributes:
        num_envs: N.
        num_workers: processes that run them (0 for a `SerialEnv`).
        device: of the batches, or None.
        specs: one `EnvSpec` per env.
        options: the `ExecutorOptions` in force.
        is_resumed: whether `load_state_dict` has loaded the state of the envs, and since then no collector has used
            them, and they were not all reset: the first collector continues their episodes.
    """

    is_resumed = False

    def __init__(
        self,
        pool: Pool,
        *,
        seed: int,
        device: torch.device | None,
        copy: bool,
        options: ExecutorOptions,
        parts: Parts = Parts(),  # noqa: B008  # a tuple
    ) -> None:
        self._pool = pool
        self._finalizer = Finalizer(self, close_in_owner, pool, os.getpid())
        self._engine: Engine = parts.engine(
            pool,
            seed=seed,
            device=device,
            copy=copy,
            options=options,
        )
        recycle(self._engine)
        self._guard = self._engine.guard
        # At the interpreter's exit it runs before the pool is closed, so a thread that is in a call gets `Closed`.
        self._guard.shut_with(self)
        self._exchange = parts.exchange(self._engine)
        self._rollouts = RolloutRunner(self._engine, parts.run)
        self._added = AddedRows(self._engine.known, pool.num_envs)
        self.options = options
        self.device = self._engine.device
        self.num_envs = pool.num_envs
        self.num_workers = pool.num_workers
        self.specs: tuple[EnvSpec, ...] = tuple(pool.specs)
        #: `(factory, env id)`: returns what builds the env of a user's factory; a facade sets its own.
        self.hosted: Callable[[Any, int], Any] = lambda factory, _: factory
        self.compile()

    def compile(self) -> None:
        """Compile steps, sends and receives; to be called again after a part of the engine was replaced (in tests)."""
        self._fast_step = compile_step(self._engine, Op.STEP)
        self._fast_step_reset = compile_step(self._engine, Op.STEP_RESET)
        if not self._engine.plain.recv:
            self._exchange.fast = FastExchange(self._engine)

    # ---- what it is --------------------------------------------------------------------------

    @property
    def spec(self) -> EnvSpec:
        """The spec of env 0; the spec of every env unless the envs are different tasks (see `specs`)."""
        return self.specs[0]

    @property
    def observation_spec(self) -> tuple[LeafSpec, ...]:
        """The observation leaves of a reset or step (of env 0)."""
        return OneForEach(self.spec.observation)

    @property
    def action_spec(self) -> tuple[LeafSpec, ...]:
        """The action leaves of a step (of env 0)."""
        return OneForEach(self.spec.action)

    @property
    def reward_spec(self) -> tuple[LeafSpec, ...]:
        """The reward leaves (of env 0)."""
        return OneForEach(self.spec.reward)

    @property
    def done_spec(self) -> tuple[LeafSpec, ...]:
        """The done leaves (of env 0): done, terminated, truncated, then nested ones."""
        return OneForEach(self.spec.done)

    @property
    def batch_size(self) -> torch.Size:
        """`[N]`, or `[N, *B]` if every env is itself a batch of shape B."""
        return self._engine.batch_size

    @property
    def engine(self) -> Engine:
        """The protocol below this API, for facades that return something other than TensorDicts."""
        return self._engine

    @property
    def seed(self) -> int:
        """The root seed in use; drawn from the system's entropy if none was given."""
        return self._engine.seed

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._guard.is_closed

    def __repr__(self) -> str:
        """Describe the envs, the number of workers, and whether C makes the steps."""
        state = "closed" if self.is_closed else self._engine.plain.brief
        return f"{type(self).__name__}({self.num_envs} x {self.spec.family}, num_workers={self.num_workers}, {state})"

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse to be called as an env factory: other libraries call objects that they do not recognise as envs."""
        raise TypeError(
            f"calling failed: a {type(self).__name__} is an executor, not a function that makes an env. Where another "
            f"library takes an env, use its facade: ParallelEnv of envherd.torchrl, SubprocVecEnv of "
            f"envherd.sb3, or AsyncVectorEnv of envherd.gymnasium."
        )

    def __reduce__(self) -> Any:
        """Refuse to be pickled or deep-copied."""
        raise TypeError(
            f"pickling failed: a live {type(self).__name__} holds processes. Pickle its factories instead."
        )

    if not TYPE_CHECKING:  # to a type checker, unknown attributes remain unknown

        def __getattr__(self, name: str) -> Any:
            """Name what takes the place of an attribute that envs of other libraries have."""
            raise no_attribute(self, name)

    # ---- reset and step ----------------------------------------------------------------------

    def reset(
        self,
        td: TensorDictBase | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Start new episodes and return where all envs are now.

        Args:
            td: may carry a `_reset` mask (bool `[N]` or `[N, 1]`, or nested: `("agents", "_reset")`):
                only those envs are reset; the rows of the others hold their current state. Without a mask all envs are
                reset. Never modified.
            seed: one root seed for everything from now on (as `set_seed`), or one seed per env for this reset only
                (None: the env's generator continues).
            list_of_kwargs: keyword arguments of `reset`, one dict for each env.
            **kwargs: keyword arguments of every env's `reset`, e.g. Gymnasium's `options={...}`.

        Returns:
            The root batch `[N]`: observation, done, terminated, truncated. Own memory.

        Raises:
            EnvError: an env raised; the others were reset.
            (WorkerLost, WorkerTimeout): a worker ended or passed a deadline.
            Busy: an env has an answer that was not received yet, or another thread makes a call.
            Closed: the executor is closed.
        """
        engine = self._engine
        if td is not None:
            need_batch("reset", td)
        if list_of_kwargs is not None and not isinstance(list_of_kwargs, (list, tuple)):
            raise TypeError(
                f"reset failed: expected list_of_kwargs as a list of dicts, got {list_of_kwargs!r}."
            )
        seeds, root_seed = _seeds_or_root(seed)
        with self._guard:
            self._guard.refuse_rolling()
            mask = reset_mask(td, tuple(self.batch_size))
            env_ids = (
                engine.all_ids
                if mask is None
                else np.flatnonzero(mask.reshape(self.num_envs, -1).any(1))
            )
            engine.refuse_under_way(env_ids)
            extras = engine.extras_of(env_ids, seeds, list_of_kwargs, kwargs)
            if root_seed is not None:
                engine.set_seed(root_seed)
            engine.stale_roots.forget()
            if len(env_ids):
                engine.write_reset_masks(mask)
                engine.reset_envs(env_ids, extras)
            if mask is None or mask.all():
                self.is_resumed = False
            return engine.batches.current(engine.all_ids)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Step every env once.

        Args:
            td: batch `[N]` with the action (and state, if the envs have one). Gets the key `next`; a policy's own
                entries there (its state) are kept.

        Returns:
            `td` itself, with `next`: observation, reward, done, terminated, truncated (float32 reward
            `[N, 1]` and bool flags `[N, 1]` unless the envs' family says otherwise).

        Raises:
            ActionError, ResetNeeded: refused, nothing was stepped.
            EnvError: an env raised; the others were stepped, see `error.partial`.
            WorkerLost, WorkerTimeout, Busy, Closed: see docs/errors.md.
        """
        if self._fast_step(td) is None:
            self._step_all("step", td, Op.STEP)
        return td

    def step_and_maybe_reset(
        self,
        td: TensorDictBase,
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Step every env once and reset the envs that ended, in one round trip.

        Returns:
            `(td, root)`: `td` as `step` returns it, with the true last observations in `next`, and
            the batch to act on next: reset observations for the envs that ended, and `next` for the
            rest (the same tensors, as `step_mdp` shares them, when no env ended).
        """
        if (pair := self._fast_step_reset(td)) is not None:
            return pair
        return self._step_all("step_and_maybe_reset", td, Op.STEP_RESET)

    def _step_all(
        self,
        call: str,
        td: TensorDictBase,
        op: Op,
    ) -> tuple[TensorDictBase, Any]:
        """Make a step that is not plain; a policy's own entries in `next` are kept and copied to the root."""
        need_batch(call, td)
        with self._guard:
            next_td, root = self._engine.step_all(td, op)
            written = get_leaf(td, "next")
            if written is not None:
                self._engine.stale_roots.look(td, self._engine.all_ids)
            own = None if written is None else own_leaves(written, self._engine.known)
            if own is not None:
                next_td.update(own)
                if root is not None:
                    root.update(own)
            set_next(td, next_td)
            return td, root

    @names_right_keyword
    def rollout(  # noqa: PLR0913  # the arguments of TorchRL's rollout
        self,
        max_steps: int,
        policy: RolloutPolicy | None = None,
        *,
        callback: Callable[[Any, TensorDictBase], Any] | None = None,
        auto_reset: bool = True,
        break_when_any_done: bool | None = None,
        tensordict: TensorDictBase | None = None,
        set_truncated: bool = False,
        out: TensorDictBase | None = None,
        primer: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Collect up to `max_steps` steps of all envs.

        Args:
            max_steps: T, at least 1.
            policy: takes a root batch `[N]` (VIEWS of the rollout: read, do not write) and returns a batch with the
                action and anything else to keep (log-probabilities, hidden states); None draws random actions. Runs
                without grad. Keys other than the envs' that it writes into `next` are in its next root, unchanged.
            callback: called with the executor and each step's batch, `next` included (VIEWS of the rollout). It and the
                policy may call `get`, `call`, `current` and `infos`, but must not step or reset the envs.
            auto_reset: reset all envs first. False continues from their current state, and resets those that have
                ended.
            break_when_any_done: True stops after the first step at which an env ends, as TorchRL does: the batch may
                have fewer than `max_steps` steps. False resets the envs that end, and always collects `max_steps`. None
                is True, and logs a warning each time that it cuts a rollout short.
            tensordict: only with `auto_reset=False`, the caller's root. Only keys other than the envs' are used: the
                policy's state before the first step.
            set_truncated: mark the last step of every env, and of its agents, `truncated` and `done`.
            out: batch `[N, T]` to fill, T at least `max_steps`; the steps that were filled are returned. If an earlier
                rollout returned it whole and this one fills it to the end, the workers write into it directly;
                otherwise the data are copied at the end. If an episode's end stops the rollout early, the entries after
                the returned steps are undefined.
            primer: batch `[N]`, the policy's state at the beginning of an episode; set in the rows of envs that are
                reset.

        Returns:
            Batch `[N, t]`, time last: root observation, action, `next`. The caller owns its memory (no later rollout
            writes to it). A process forked from this one shares it, and sees changes in place: clone data before
            changing it there.

        Raises:
            ValueError: `max_steps`, `out`, `tensordict` or `primer` do not fit the envs or each other.
            EnvError, WorkerLost, WorkerTimeout, ActionError, ResetNeeded, Busy, Closed: the rollout is lost; the
                executor remains usable.
        """
        data = self._rollouts.run(
            self,
            max_steps,
            policy,
            callback=callback,
            auto_reset=auto_reset,
            break_when_any_done=break_when_any_done,
            tensordict=tensordict,
            set_truncated=set_truncated,
            out=out,
            primer=primer,
        )
        if auto_reset:
            self.is_resumed = False
        return data

    @property
    def policy_state(self) -> TensorDictBase | None:
        """The policy's state when an error ended the latest rollout, batch `[N]`; else None.

        It matches the envs' current state: `rollout(..., auto_reset=False, tensordict=env.policy_state)` continues.
        """
        return self._rollouts.state_left

    def rand_action(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Return `td` (or a new batch `[N]`) with uniformly drawn legal actions, from a generator of the root seed.

        If `td` holds the envs' `action_mask` (as roots do), only allowed actions are drawn.

        Args:
            td: of all envs, or of those in its `env_ids`, as `recv` and `current` return it.
        """
        if td is not None:
            need_batch("rand_action", td)
        ids = None if td is None else td.get(ENV_IDS, None)
        if td is not None and ids is None and td.batch_size[:1] != self.batch_size[:1]:
            raise wrong_rows("rand_action", self.num_envs, td)
        env_ids = None if ids is None else self._exchange.as_ids(ids)
        return self._engine.sampler.fill(td, self.batch_size, self.device, env_ids)

    def rebuild(
        self,
        env_ids: Any = None,
        *,
        factories: MakeEnv | None = None,
        env_kwargs: EnvKwargs = None,
    ) -> None:
        """Build other envs in place of some, in the same processes: another task, level or scene with an equal spec.

        Each env is closed before the new one is built. Afterwards the data are those of an executor that was made with
        these arguments: the next episode of such an env has the number 0 and its seed. See docs/custom_envs.md.

        An episode that is broken off ends with a row that no step has made, as after a loss: the last observation,
        reward 0, `truncated` (and `interrupted`, where rows have that). It is in the next step of all envs, or in what
        `recv` returns if the env was sent. Before a `send`, such an env must be reset.

        Args:
            env_ids: the envs, as in `send`; default: all.
            factories: one factory or name for all of them, or a list of one for each; None for those that they have.
            env_kwargs: arguments of the factory calls: one dict for all of them, or a list. None for none; without
                `factories`, for those that they have.

        Raises:
            SpecError: a new env has another spec; the message names the first leaf that differs.
            FactoryError: as in the constructor. After an error from the workers, all envs of the call need a reset, and
                are what they were before the call.
            WorkerLost, WorkerTimeout: a worker died meanwhile, or has not built its envs within
                `options.build_timeout_s`.
            Busy: a rollout, or a facade's step or `call_async`, is in progress.
        """
        with self._guard:
            ids = self._exchange.as_ids(env_ids)
            old = [self._pool.blueprint.calls[i] for i in ids.tolist()]
            made = [call.factory for call in old]
            if factories is not None and len(ids):
                made = [
                    *map(self.hosted, as_factories(len(ids), factories), ids.tolist()),
                ]
            elif env_kwargs is None:
                env_kwargs = [call.sent.kwargs for call in old]
            self._engine.rebuild(
                ids,
                self._pool.blueprint.draw(made, env_kwargs, ids.tolist()),
            )

    # ---- send and recv -----------------------------------------------------------------------

    def send(
        self,
        td: TensorDictBase,
        env_ids: Any = None,
        *,
        maybe_reset: bool = True,
    ) -> None:
        """Step some envs without waiting for them.

        Args:
            td: batch `[k]` with their actions. Other tensors that the policy has added, such as log-probabilities, are
                copied, and are in what `recv` returns with these steps. (Not from a lazy stack.)
            env_ids: int `[k]`, or bool `[N]`, a mask; default: td's own `env_ids`, else all envs.
            maybe_reset: also reset the envs that end, as `step_and_maybe_reset` does.

        Raises:
            ActionError, ResetNeeded, Busy: refused, nothing was sent.
        """
        if maybe_reset not in (True, False):
            need_bools("send", maybe_reset=maybe_reset)
        with self._guard:
            self._guard.refuse_rolling()
            added = self._added.find(td)
            # Also to forget what was added for earlier steps.
            if added or self._added.rows:
                env_ids = self._exchange.ids_of(td, env_ids)
                # Else it would replace the rows of steps that were not received yet.
                self._engine.refuse_under_way(env_ids)
                self._added.keep(env_ids, added)
            self._exchange.send(td, env_ids, Op.STEP_RESET if maybe_reset else Op.STEP)

    def recv(
        self,
        min_envs: int | None = None,
        timeout_s: float | None = None,
        *,
        max_envs: int | None = None,
        env_ids: Any = None,
        with_root: bool = True,
    ) -> TensorDictBase:
        """Return the transitions of the first envs that are ready, in the order in which they were sent.

        Args:
            min_envs: least number of envs; default: all that were sent, or all of `env_ids`.
            timeout_s: seconds; None waits without a limit (each step still has its own deadline, if one is set).
            max_envs: largest number of envs; default: `min_envs`. With `timeout_s`, the call waits up to that long for
                `max_envs`, and then returns the envs that are ready, if there are at least `min_envs`. Without it, the
                call returns as soon as `min_envs` are ready, with all ready envs up to `max_envs`.
            env_ids: int `[k]`; receive only these envs, which were sent. If all of them are received, they keep this
                order: for stepping one group of envs while the policy works on another.
            with_root: include the root and action of each step. False saves a copy of every observation if the caller
                has kept its roots.

        Returns:
            Batch `[k]`, k from `min_envs` to `max_envs`, with `env_ids` (int64), the root observation and action of
            each step and the tensors that the policy has added to them (with `with_root`), and its `next`. Own memory.
            `current(env_ids)` returns the envs' roots after it.

        Raises:
            ValueError: fewer envs, or not these envs, were sent.
            TimeoutError: fewer were ready in time. Nothing is lost: receive again.
            EnvError, WorkerLost, WorkerTimeout: the envs concerned are no longer under way; the others still are.
        """
        if with_root not in (True, False):
            need_bools("recv", with_root=with_root)
        with self._guard:
            self._guard.refuse_rolling()
            td = self._exchange.recv(
                min_envs,
                max_envs,
                timeout_s,
                env_ids,
                with_root=with_root,
            )
            if with_root and self._added.rows:
                self._added.give(self._exchange.as_ids(td.get(ENV_IDS)), td)
            return td

    def current(self, env_ids: Any = None) -> TensorDictBase:
        """Return the current root batch `[k]` of envs, with their `env_ids`, to act on next.

        The policy and the callback of a rollout may also call it. Own memory, which it may share with the `next` of the
        batch that was received last (as `step_mdp` does). It may show writes to that `next` by numpy, but not by torch.
        """
        with self._guard:
            return self._exchange.current(env_ids)

    # ---- everything else ---------------------------------------------------------------------

    def set_seed(self, seed: int) -> int:
        """Use a new root seed: the next reset of every env begins its episode 0. Returns the seed."""
        with self._guard:
            self._guard.refuse_rolling()
            self._engine.set_seed(seed)
            return self._engine.seed

    def call(
        self,
        name: str,
        *args: Any,
        env_ids: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method of each env (dotted names are followed) and return the results in env order.

        An env that was sent makes its step first; `recv` still returns the step. `get`, `set` and `render` likewise.

        Raises:
            EnvError: an env raised.
        """
        _need_name("call", name)
        return self.ask("call", env_ids, name=name, args=args, kwargs=kwargs)

    def get(self, name: str, env_ids: Iterable[int] | None = None) -> list[Any]:
        """Return an attribute of each env, in env order."""
        _need_name("get", name)
        return self.ask("get", env_ids, name=name)

    def set(self, name: str, value: Any, env_ids: Iterable[int] | None = None) -> None:
        """Set an attribute of each env: to `value`, or to `value[i]` if it is a list.

        Dotted names are followed: `unwrapped.x` is set on the innermost env, `x` on the outermost wrapper.

        Args:
            name: of the attribute.
            value: one value for all envs, or a list with one value per env. `[[1, 2]] * N` sets the list `[1, 2]` in
                each of N envs. Tuples and arrays are single values.
            env_ids: the envs, in the order of the list; default: all.

        Raises:
            ValueError: the list has another length.
        """
        _need_name("set", name)
        ids = self._exchange.as_ids(env_ids).tolist()
        if isinstance(value, list) and len(value) != len(ids):
            raise ValueError(
                f"set failed: expected a list of {len(ids)} values, one for each env, got {len(value)} values. To set "
                f"the list itself in every env, pass [value] * {len(ids)}."
            )
        values = value if isinstance(value, list) else [value] * len(ids)
        self.ask("set", ids, name=name, args=tuple(values))

    def render(self) -> list[Any]:
        """Return a picture of each env now, uint8 `[H, W, 3]`, or None if an env cannot draw itself.

        If none can, there is a warning.
        """
        pictures = self.ask("render", None)
        if all(picture is None for picture in pictures):
            warnings.warn(
                "render: no env has a picture. Build them with render_mode='rgb_array', where they have one.",
                stacklevel=2,
            )
        return pictures

    @property
    def _saving(self) -> ModuleType:
        from envherd.executor.guests import saving

        return saving

    def save(self, env_ids: Any = None) -> list[dict[str, Any]]:
        """Return the states of envs now, from which `restore` continues bit for bit.

        Which families can: docs/checkpoints.md. `ParallelEnv.branch` copies an env of any other family in memory.

        Args:
            env_ids: the envs; default: all.

        Returns:
            A dict for each env, in the order of `env_ids`, copies. `env` is the env's own state, with its wrappers,
            generators and, if they are collected, the statistics of its episode. `root` is its present root, as nested
            dicts of tensors. `ended` says whether it must be reset. `episode` is the one that its next reset begins.
            `generators` has its global generators, with `isolate_rng`. `torch.save` can save it.

        Raises:
            EnvError: an env's state cannot be read; the message says what prevents it. Nothing has changed.
            Busy: one of the envs was sent and not received.
        """
        with self._guard:
            return self._saving.save(self._engine, self._exchange.as_ids(env_ids))

    def restore(self, states: Sequence[Mapping[str, Any]], env_ids: Any = None) -> None:
        """Restore states from `save`, in the same envs or in others that equal factory calls built.

        `current()` then has the saved roots, and the next steps with equal actions return equal data. All other envs
        continue. To continue one state in several envs: `env.restore([state] * 4, [0, 1, 2, 3])`. The seed of the next
        episode is that of the env itself: it follows from the root seed, the env's id, and the saved episode.

        Args:
            states: one per env, from `save`. Their envs may be of another executor, or another process.
            env_ids: the envs, in the order of `states`; default: all.

        Raises:
            ValueError: a state is damaged or of another env, or there are more or fewer states than envs; nothing was
                restored.
            EnvError: `load_state_dict` of an env raised; the envs that were to be restored need a reset.
            Busy: one of the envs was sent and not received, or a rollout is in progress.
        """
        with self._guard:
            self._saving.restore(self._engine, self._exchange.as_ids(env_ids), states)

    def state_dict(self, *, with_envs: bool | None = None) -> dict[str, Any]:
        """Return the state for a checkpoint: the envs' states and roots, and the seeds of their next episodes.

        Args:
            with_envs: False leaves out the envs' states and roots. An executor that loads such a state begins new
                episodes with the next seeds. None does so if an env cannot be saved, and logs what prevents it. True
                raises then.

        Returns:
            A dict with the envs' states as `env0` and so on, and with a dict `executor`. There, `version` is that of
            this form, `seed` the root seed, `episodes` has the episode that the next reset of each env begins,
            `actions` is the state of the generator of `rand_action`, and `roots`, `ended` and `generators` have each
            env's entries of `save`. `torch.save` can save it.

        Raises:
            EnvError: an env cannot be saved, and `with_envs` is True.
            Busy: an env was sent and not received.
        """
        with self._guard:
            return self._saving.state_dict(self._engine, with_envs=with_envs)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`, of this executor or of another one with the same number of envs.

        Afterwards `current()` returns the saved roots, and envs can be stepped without a reset unless they needed one
        when the state was saved. Their next episodes have the seeds that would have come next. From a state without
        envs only the seeds are loaded, and all envs must be reset. Without the entry "executor" every env counts as
        running, and `current()` returns the observation from before the load: act on a root that you have saved
        yourself.

        Raises:
            ValueError: the state is damaged, or of other envs or another number of envs; nothing was loaded.
            EnvError: `load_state_dict` of an env raised; all envs must be reset.
            Busy: an env was sent and not received, or a rollout is in progress.
        """
        with self._guard:
            self._saving.load_state_dict(self._engine, state)
        self.is_resumed = "roots" in state.get("executor", ())

    def infos(self, section: Literal["next", "root"] = "next") -> list[dict[str, Any]]:
        """Return each env's info of its latest command, a copy; empty if it has none.

        A rollout's latest command is its latest step so far.

        Args:
            section: "next": in the step; "root": in the reset, if the command was or included one.

        Raises:
            ValueError: another section, or the executor drops infos (the default of `ExecutorOptions.infos`).
        """
        self._guard.check()
        if self.options.info_policy == "drop":
            raise ValueError(
                'infos failed: expected options=ExecutorOptions(infos="plain") (or "pickle"), got '
                f"infos={self.options.infos!r}, which discards the dicts."
            )
        if section not in ("next", "root"):
            raise ValueError(
                f"infos failed: expected section 'next' or 'root', got {section!r}."
            )
        infos = self._engine.side.infos.own(section)
        return [infos.get(i, {}) for i in range(self.num_envs)]

    def statistics(self) -> "Statistics":
        """Return the counts so far, each worker's load and memory, and which calls run in C."""
        self._guard.check()
        from envherd.executor.guests.monitor import count

        engine = self._engine
        return count(engine.pool, engine.memory, engine.ready_at, **engine.counts())

    def worker_output(self, worker_id: int) -> str:
        """Return the part of a worker's output that is kept (empty unless output is captured)."""
        self._guard.check()
        worker_id = as_count("worker_output", "worker_id", worker_id, least=0)
        try:
            return self._pool.worker_output(worker_id)
        except IndexError:
            raise ValueError(
                f"worker_output failed: expected worker_id below {self.num_workers}, got {worker_id}."
            ) from None

    def close(self) -> None:
        """Close the envs and end the workers, within `options.close_timeout_s`. Idempotent.

        A worker finishes its current call of an env, and makes no other. Ctrl-C ends the workers at once, and
        is the only exception that is raised.
        """
        self._guard.shut()
        if (mover := self._engine.batches.mover) is not None:
            mover.close()
        self._finalizer()

    def ask(
        self,
        what: str,
        env_ids: Iterable[int] | None,
        **question: Any,
    ) -> list[Any]:
        """Send envs a request other than a step; `call`, `get`, `set` and the facades use it.

        Args:
            what: see `messages.Ask`.
            env_ids: of the envs to ask; None for all.
            **question: `name`, `args` and `kwargs`, as `messages.Ask` has them.

        Returns:
            One answer per env, in the order asked.
        """
        with self._guard:
            ids = self._exchange.as_ids(env_ids).tolist()
            answers = self._engine.ask(what, ids, **question)
            return [crossed(answers[i]) for i in ids]


def _seeds_or_root(seed: Any) -> tuple[Any, int | None]:
    """Return the seeds of all envs and the root seed that `reset` was given: one of them, or neither."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and seed >= 0:
        return None, int(seed)
    is_list = isinstance(seed, (Sequence, np.ndarray, torch.Tensor)) and not isinstance(
        seed,
        (str, bytes),
    )
    if seed is None or is_list:
        return seed, None
    raise ValueError(
        f"reset failed: expected seed as an int of at least 0, a list of them or None, got {seed!r}."
    )


def _need_name(call: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"{call} failed: expected the name of a method or attribute of the envs, got {name!r}."
        )
