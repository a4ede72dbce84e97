"""Drop-in replacements for other libraries' vector envs, on top of the executor; import the one you need."""

from __future__ import annotations


class needing:  # noqa: N801  # used as a function
    """Name what to install if an import in the block does not find a package; other errors of imports pass unchanged.

    Args:
        install: what brings the packages, for pip.
        *packages: which the block imports.
    """

    def __init__(self, install: str, *packages: str) -> None:
        self._install, self._packages = install, packages

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise the error that names what to install."""
        for one in (error, error and error.__cause__):  # Ray raises others from those of its imports
            if isinstance(one, ModuleNotFoundError) and one.name in self._packages:
                raise ModuleNotFoundError(
                    f"importing a facade failed: expected the package {one.name}, which is not installed. Install it: "
                    f'pip install "{self._install}".',
                    name=one.name,
                ) from error
