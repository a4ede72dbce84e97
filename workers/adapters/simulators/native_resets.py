"""Take the last observation of rows that a simulator resets within its own step, before it is overwritten.

IsaacLab's simulators (`ManagerBasedRLEnv`, `DirectRLEnv`) and similar ones step, find the rows that have ended, call
`_reset_idx` for these, and only then compute the observations that they return. For a row that has ended, that is the
first observation of its next episode. Newer ones publish the last one as `extras["final_obs"]` if
`cfg.compute_final_obs` is set.

Guarantees of `ResetWatch`
- The last observation is in separate memory before the first row is reset, even if the simulator reuses its observation
  buffers. `extras["final_obs"]` is used if the simulator publishes it; otherwise the observation is computed as the
  simulator does, with the noise that its step would add.
- Observation histories of a manager-based simulator are pushed once per step and row, as without it, and the last
  observation's history ends with it. (IsaacLab's own `final_obs` leaves histories as they were one step before, so
  where there are any it is computed here.)
- `rows` also shows rows that were reset without having ended.
Imports no class of IsaacLab; it relies on the names of its public methods and attributes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from envherd.workers.errors import SpecError

FINAL_KEYS = ("final_obs", "final_observation")


class ResetWatch:
    """Intercepts the calls of a simulator's `_reset_idx` during its step.

    Args:
        env: the simulator, without wrappers; its `_reset_idx` is replaced by one that first takes the observations.
        num_rows: B.
        observe: simulator -> its observations now; None chooses a way.

    Attributes:
        final: observations before the rows of the latest step were reset, all B rows; None if none was.
        rows: bool `[B]`, the rows that were reset in the latest step; None if none was.
        id_dtype: of the row ids that the simulator itself uses.
        takes_published: whether `final` is what the simulator publishes, if it does.
    """

    def __init__(
        self,
        env: Any,
        num_rows: int,
        observe: Callable[[Any], Any] | None,
    ) -> None:
        self._env = env
        self._num_rows = num_rows
        self._observe = observe or _observer(env)
        self.takes_published = observe is None and not list(_histories(env))
        self._native: Callable[..., Any] = env._reset_idx  # noqa: SLF001  # the hook that IsaacLab documents
        env._reset_idx = self._reset_idx  # noqa: SLF001
        self._is_stepping = False
        self.final: Any = None
        self.rows: torch.Tensor | None = None
        self.id_dtype = torch.int64

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Watch for as long as a step lasts."""
        self.final = self.rows = None
        for key in FINAL_KEYS:
            # So that an entry after the step is from this step.
            _extras(self._env).pop(key, None)
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _reset_idx(self, env_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(env_ids, torch.Tensor) and env_ids.dtype is not torch.bool:
            self.id_dtype = env_ids.dtype
        if self._is_stepping:
            if self.final is None:
                published = (
                    published_final(_extras(self._env))
                    if self.takes_published
                    else None
                )
                self.final = clone(
                    self._observe(self._env) if published is None else published
                )
            self._note(env_ids)
        return self._native(env_ids, *args, **kwargs)

    def _note(self, env_ids: Any) -> None:
        if self.rows is None:
            self.rows = torch.zeros(
                self._num_rows,
                dtype=torch.bool,
                device=getattr(self._env, "device", "cpu"),
            )
        # Not every version of torch takes int32 for indices, which simulators may have as ids.
        ids = slice(None) if env_ids is None else env_ids
        self.rows[
            ids.long()
            if isinstance(ids, torch.Tensor) and ids.dtype is not torch.bool
            else ids
        ] = True


class AgentsAsOne:
    """The `DirectMARLEnv` inside the env that IsaacLab's `multi_agent_to_single_agent` returns.

    It has the attributes of the `DirectMARLEnv`; its observations are those of the single agent.

    Args:
        converted: what `multi_agent_to_single_agent` returned.
    """

    def __init__(self, converted: Any) -> None:
        self.__dict__["_converted"] = converted
        self.__dict__["_env"] = converted.env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._env, name, value)

    def _get_observations(self) -> dict[str, torch.Tensor]:
        return self.joined(with_noise=False)

    def joined(self, *, with_noise: bool) -> dict[str, torch.Tensor]:
        """Return the observations `[B, ...]` now, as the single agent has them after a step (with noise) or a reset."""
        env = self._env
        env.obs_dict = seen = env._get_observations()  # noqa: SLF001  # `state` reads `obs_dict`
        if with_noise and env.cfg.observation_noise_model:
            models = env._observation_noise_model  # noqa: SLF001
            seen.update(
                {agent: models[agent](seen[agent]) for agent in seen if agent in models}
            )
        if self._converted._state_as_observation:  # noqa: SLF001
            return {"policy": env.state()}
        return {
            "policy": torch.cat(
                [
                    seen[agent].reshape(env.num_envs, -1)
                    for agent in env.possible_agents
                ],
                dim=-1,
            )
        }


def published_final(extras: Any) -> Any:
    """Return the last observations that a simulator has published, or None."""
    found = extras if isinstance(extras, Mapping) else {}
    return next((found[key] for key in FINAL_KEYS if found.get(key) is not None), None)


def clone(observations: Any) -> Any:
    """Return a copy of nested observations."""
    if isinstance(observations, Mapping):
        return {key: clone(value) for key, value in observations.items()}
    return (
        observations.clone() if isinstance(observations, torch.Tensor) else observations
    )


def reset_rows(env: Any, ids: torch.Tensor, rows: torch.Tensor) -> Any:
    """Reset some rows of an IsaacLab-like simulator that have not ended, and return its observations.

    Args:
        env: the simulator, without wrappers.
        ids: of the rows, in the simulator's form.
        rows: the same as bool `[B]`.

    Returns:
        Observations of all rows; the histories of the other rows are unchanged.
    """
    before = [
        (history, dict(vars(history)), _buffer_copy(history))
        for history in _histories(env)
    ]
    if hasattr(env, "observation_manager"):
        observations, _ = env.reset(env_ids=ids)
        observations = clone(observations)
    else:
        env._reset_idx(ids)  # noqa: SLF001
        env.scene.write_data_to_sim()
        env.sim.forward()
        observations = clone(env._get_observations())  # noqa: SLF001
    for history, attributes, buffer in before:
        _restore_rows(history, attributes, buffer, ~rows)
    return observations


def _observer(env: Any) -> Callable[[Any], Any]:
    """Return the function that computes a simulator's observations as its step does."""
    if hasattr(env, "observation_manager"):
        return _observe_managed
    if isinstance(env, AgentsAsOne):
        return lambda agents: agents.joined(with_noise=True)
    if hasattr(env, "_get_observations"):
        return _observe_direct
    raise SpecError(
        f"reading the env failed: expected `_get_observations` or an `observation_manager` besides `_reset_idx`, got "
        f"neither in {type(env).__name__}. Say how its observations are computed: return "
        f"TorchNativeAdapter(env, final_observation=lambda env: ...) from the factory."
    )


def _observe_managed(env: Any) -> Any:
    before = [
        (history, dict(vars(history)), _buffer_copy(history))
        for history in _histories(env)
    ]
    observations = clone(env.observation_manager.compute(update_history=True))
    for history, attributes, buffer in before:
        vars(history).update(attributes, _buffer=buffer)
    return observations


def _observe_direct(env: Any) -> Any:
    observations = clone(env._get_observations())  # noqa: SLF001
    if getattr(env.cfg, "observation_noise_model", None):
        observations["policy"] = env._observation_noise_model(observations["policy"])  # noqa: SLF001
    return observations


def _histories(env: Any) -> Iterator[Any]:
    """Yield the histories that a manager-based simulator keeps of its observation terms."""
    groups = (
        getattr(
            getattr(env, "observation_manager", None),
            "_group_obs_term_history_buffer",
            None,
        )
        or {}
    )
    for terms in groups.values():
        yield from terms.values()


def _buffer_copy(history: Any) -> Any:
    for name in ("_buffer", "_num_pushes"):
        if not hasattr(history, name):
            raise SpecError(
                f"reading histories failed: expected IsaacLab's CircularBuffer, got a {type(history).__name__} "
                f"without {name}. Say how observations are computed: TorchNativeAdapter(env, final_observation=...)."
            )
    history._num_pushes = history._num_pushes.clone()  # noqa: SLF001  # what `vars` was copied from stays
    return None if history._buffer is None else history._buffer.clone()  # noqa: SLF001


def _restore_rows(
    history: Any,
    attributes: Mapping[str, Any],
    buffer: torch.Tensor | None,
    rows: torch.Tensor,
) -> None:
    """Restore some rows of a history, even if its ring pointer has moved since."""
    if buffer is None:
        return
    now = history._buffer  # noqa: SLF001
    if getattr(history, "_stack_dim_internal", None) is not None:
        now[rows] = buffer[rows]
    else:
        # Of versions that have one.
        num_pushed = getattr(history, "_pointer", 0) - attributes.get("_pointer", 0)
        now[:, rows] = buffer.roll(num_pushed, 0)[:, rows]
    history._num_pushes[rows] = attributes["_num_pushes"][rows]  # noqa: SLF001


def _extras(env: Any) -> Any:
    extras = getattr(env, "extras", None)
    return extras if isinstance(extras, dict) else {}
