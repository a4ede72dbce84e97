"""An adapter around another one, which adds leaves to its observation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envherd.shm.specs import Key, LeafSpec
from envherd.workers.adapters.base import Adapter
from envherd.workers.errors import SpecError


class Wrapping(Adapter):
    """Forwards everything to another adapter; subclasses add the values of further leaves.

    Args:
        inner: the adapter.
        leaves: of the observation, behind those of the env.
        roots: keys under which all added leaves are.
        option: name of the option that adds them, for the message.

    Raises:
        SpecError: the env has an observation under one of the added names.
    """

    def __init__(
        self,
        inner: Adapter,
        leaves: Iterable[LeafSpec],
        roots: Iterable[Key],
        option: str,
    ) -> None:
        self.inner = inner
        self.family = inner.family  # type: ignore[misc]  # one adapter for all families
        self.origin = inner.origin
        self.takes_tensors = inner.takes_tensors
        self.is_alone = inner.is_alone
        self.device = inner.device
        self.has_whole_state = inner.has_whole_state
        self.done_values = inner.done_values  # type: ignore[method-assign]
        self.render = inner.render  # type: ignore[method-assign]
        self.reseeded = inner.reseeded  # type: ignore[method-assign]
        self.close = inner.close  # type: ignore[method-assign]
        self.leaves = tuple(leaves)
        refuse_taken([leaf.key for leaf in inner.spec.observation], roots, option)
        self.unchecked = inner.unchecked | {leaf.key for leaf in self.leaves}
        self.spec = replace(
            inner.spec,
            observation=(*inner.spec.observation, *self.leaves),
        )

    @property
    def env(self) -> Any:
        """The native env, which a family may build anew."""
        return self.inner.env

    @property
    def info(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The env's info of its last reset or step (VIEW)."""
        return self.inner.info

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.read_state(state)()

    def read_state(self, state: Any) -> Callable[[], None]:
        return self.inner.read_state(state)


def refuse_taken(observed: Sequence[Key], roots: Iterable[Key], option: str) -> None:
    """Refuse an env that has an observation under one of the names that an option adds.

    Raises:
        SpecError: it has.
    """
    for root in roots:
        if any(key[: len(root)] == root for key in observed):
            raise SpecError(
                f"{option} failed: expected an env without an observation named {'/'.join(root)!r}, got one that "
                f"has it. Rename it in a wrapper around the env."
            )
