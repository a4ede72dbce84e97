"""How a worker runs its envs: the options of a block, and the names of their choices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

#: What an env takes and returns: tensors, or arrays and numbers, or what is known of its class.
EnvType = Literal["torch", "numpy", "auto"]

#: How infos are handled: they stay in the worker, are sent as plain data (other entries are left out), or are pickled.
InfoPolicy = Literal["drop", "plain", "pickle"]

#: Info entries that become leaves: from each name to an example value or a type.
InfoKeys = Mapping[str | tuple[str, ...], Any]


class FactoryCall(NamedTuple):
    """A factory, pickled for a worker process, and the keyword arguments of its call."""

    factory: Any
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Infos:
    """Leaves and dicts of infos at the same time, for facades whose host reports infos in any case.

    Attributes:
        policy: how infos are handled.
        keys: entries that become leaves.
    """

    policy: InfoPolicy = "drop"
    keys: InfoKeys | None = None


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """How a worker runs its envs.

    Attributes:
        isolate_rng: swap the global generators' state in and out around every call of an env.
        check_finite: refuse NaN and infinities in observations and rewards.
        infos: how to handle the envs' infos.
        info_keys: entries of the infos that become leaves, by `wrappers.leaves`.
        episode_statistics: leaves with return, length and time of the episode, by `wrappers.leaves`.
        episode_seeds: seed every reset from (root seed, env id, episode), or only where the caller gives a seed.
        env_type: what the envs take and return; `registry.find_adapter` reads it.
        first_env_id: id of env 0 for seeds, if these envs are a share of a larger batch.
        env_threads: each env has a thread, by `guests.env_threads`.
        limits_resets: whether a reset that takes too long is given up.
    """

    isolate_rng: bool = False
    check_finite: bool = False
    infos: InfoPolicy = "drop"
    info_keys: InfoKeys | None = None
    episode_statistics: bool = False
    episode_seeds: bool = True
    env_type: EnvType = "auto"
    first_env_id: int = 0
    env_threads: bool = False
    limits_resets: bool = True
