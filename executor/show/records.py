"""The episodes of an evaluation, and who played them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """One episode of an evaluation.

    Attributes:
        episode: its number in its task, from 0.
        seed: of its reset.
        length: in steps.
        returns: of each agent; of a failed episode, until the failure.
        success: what the env reported in its last step, or what `success=` returned; None without either.
        success_once: whether the env reported success in any step; None if it reports none.
        error: of an episode that failed: what the env or its worker raised. None for an episode that has ended.
    """

    episode: int
    seed: int
    length: int = 0
    returns: tuple[float, ...] = ()
    success: bool | None = None
    success_once: bool | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Who plays in a task.

    Attributes:
        env: name of the env.
        players: their names; "agent" in an env of one agent.
        roles: one per agent.
        is_focal: one per agent.
    """

    env: str
    players: tuple[str, ...] = ("agent",)
    roles: tuple[str, ...] = ("default",)
    is_focal: tuple[bool, ...] = (True,)
