"""The spaces of a vector env: read from its envs, checked as Gymnasium checks them, and batched.

The parent builds no env for that: every env describes itself in its worker.
"""

from typing import Any

from gymnasium import spaces
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envherd.executor.facades.gymnasium.worker import Description
from envherd.executor.facades.leaf_spaces import Space, leaf_spaces

#: Spaces that Gymnasium can batch.
_STANDARD = (
    spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary,
    spaces.Text, spaces.Graph, spaces.Sequence, spaces.OneOf,
)  # fmt: skip


def check_mode(observation_mode: Any) -> None:
    """Refuse anything but an observation mode, before anything is started.

    Raises:
        ValueError: neither "same" nor "different" nor a pair.
        TypeError: a pair of other objects than spaces.
    """
    if isinstance(observation_mode, tuple) and len(observation_mode) == 2:
        if not all(isinstance(space, spaces.Space) for space in observation_mode):
            kinds = " and ".join(str(type(space)) for space in observation_mode)
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {kinds}"
            )
    elif observation_mode not in ("same", "different"):
        raise ValueError(
            f"Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {observation_mode}"
        )


def batch(
    name: str,
    descriptions: list[Description],
    observation_mode: Any,
) -> tuple[Space, Space, Space, Space]:
    """Return the spaces of a vector env: of one observation, of all, of one action, of all.

    Args:
        name: of the vector env's class, for messages.
        descriptions: of its envs.
        observation_mode: "same", "different", or `(observation_space, single_observation_space)`.

    Raises:
        RuntimeError: the envs' spaces do not fit together.
        ValueError, TypeError: they cannot be batched.
    """
    first = descriptions[0]
    num_envs = len(descriptions)
    own = [one.observation_space for one in descriptions]
    if isinstance(observation_mode, tuple):
        observation_space, single = observation_mode
    elif observation_mode == "same":
        single = first.observation_space
        for env_id, space in enumerate(own):
            if space != single:
                raise RuntimeError(
                    f"{name}(..., observation_mode='same') however the sub-environments observation spaces are not "
                    f"equivalent. Those of env 0 and env {env_id} differ. If this is intentional, use "
                    f"`observation_mode='different'` instead."
                )
        observation_space = batch_space(single, num_envs)
    else:
        single = first.observation_space
        observation_space = batch_differing_spaces(own)
    if observation_mode != "same" and not all(
        is_space_dtype_shape_equiv(space, single) for space in own
    ):
        raise RuntimeError(
            f"{name}(..., observation_mode='different' or custom space) however the sub-environments observation "
            f"spaces do not share a common shape and dtype."
        )
    for env_id, one in enumerate(descriptions):
        if one.action_space != first.action_space:
            raise RuntimeError(
                f"Some environments have an action space different from `{first.action_space}`: env {env_id} has "
                f"`{one.action_space}`. In order to batch actions, the action spaces of all environments must be equal."
            )
    return (
        single,
        observation_space,
        first.action_space,
        batch_space(first.action_space, num_envs),
    )


def has_custom(space: Space) -> bool:
    """Return whether a space, or one inside it, is not one of Gymnasium's own."""
    return not all(isinstance(leaf, _STANDARD) for leaf in leaf_spaces(space))
