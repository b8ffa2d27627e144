"""What the repository index says of the server's own models: those that are loaded, those that were, and
those that could be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from gpuserve.supervisor.generation import INDEX_STATE, Generation, GenerationState
from gpuserve.supervisor.repository import Repository

#: What is said of a version with several generations is said of the first of these that it has.
_RANKS: Final = (
    GenerationState.READY,
    GenerationState.LOADING,
    GenerationState.RETIRING,
    GenerationState.STOPPING,
)
#: A model that was never loaded.
_NEVER_LOADED: Final = ((0, "", ""),)


class ModelIndex:
    """Remembers why versions are not loaded; all else it is told, or asks the repository."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._reasons: dict[str, dict[int, str]] = {}

    def known(self) -> Sequence[str]:
        """Every model that can be loaded."""
        return self._repository.names()

    def unavailable(self, model: str, version: int, reason: str) -> None:
        """A version was unloaded, or could not be loaded. One that cannot be loaded again is not kept."""
        if model in self._repository.names():
            self._reasons.setdefault(model, {})[version] = reason

    def forget(self, model: str, version: int) -> None:
        """A version is loaded."""
        reasons = self._reasons.get(model, {})
        reasons.pop(version, None)
        if not reasons:
            self._reasons.pop(model, None)

    def states(self, model: str, generations: Iterable[Generation]) -> Sequence[tuple[int, str, str]]:
        """(version, state, reason) of each version of a model, as ``messages.ModelStates`` has them."""
        is_known = model in self._repository.names()
        reasons = self._reasons.get(model, {}) if is_known else {}
        found = {version: (version, "UNAVAILABLE", reason) for version, reason in reasons.items()}
        best: dict[int, GenerationState] = {}
        for one in generations:
            if one.spec.name == model:
                version = one.spec.version
                best[version] = min(best.get(version, one.state), one.state, key=_RANKS.index)
        for version, state in best.items():
            found[version] = (version, INDEX_STATE[state], "")
        if found:
            return [found[version] for version in sorted(found)]
        return _NEVER_LOADED if is_known else ()
