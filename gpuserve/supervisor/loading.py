"""Loads at work: from declarations to generations whose workers are all ready, or to why they are not.

Which model is next, and what becomes of the generations that served until then, is for ``served_models.py``
to say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gpuserve.errors import GpuserveError, RequestError, StartupError
from gpuserve.spec import ModelSpec
from gpuserve.supervisor.generation import Generation, GenerationEvent, GenerationState
from gpuserve.supervisor.generation_table import GenerationTable
from gpuserve.supervisor.model_operations import Done, Load, cannot_poll

logger = logging.getLogger(__name__)


class Loading:
    """The loads of one server. ``serve`` lets a model's requests go to what is to serve it from now on, in
    place of what it is given.
    """

    def __init__(self, table: GenerationTable, serve: Callable[[str, Sequence[Generation]], None]) -> None:
        self._table = table
        self._serve = serve

    def begin(self, load: Load) -> Done | None:
        """Start the workers of a load. It is done at once where not even that can be done."""
        try:
            specs = load.read()
        except RequestError as error:
            return Done(error)
        except GpuserveError as error:
            logger.error("model %s cannot be loaded: %s", load.model, error)
            return Done(cannot_poll(load.model))
        return self._start(load, specs) if specs else Done(cannot_poll(load.model))

    def _start(self, load: Load, specs: Sequence[ModelSpec]) -> Done | None:
        front = self._table.front
        assert front is not None
        load.generations = [self._table.add(spec, served=False) for spec in specs]
        for generation in load.generations:
            front.add_model(generation.number, generation.spec, attached=False, served=False)
            try:
                generation.group.start()
            except StartupError as error:
                self._table.drop(load.generations)
                self._table.tell_states(load.model)
                name = generation.group.workers[0].instance.name
                return Done(load.failure(generation.spec, name, str(error)))
        self._table.tell_states(load.model)
        for generation in load.generations:
            self.check_loaded(generation)
        return Done(None) if self.is_complete(load) else None

    def check_loaded(self, generation: Generation) -> bool:
        """Whether a generation is loaded at this moment, which one without workers is from the beginning."""
        if generation.state is not GenerationState.LOADING or not generation.group.is_loaded:
            return False
        generation.apply(GenerationEvent.LOADED)
        self._table.index.forget(generation.spec.name, generation.spec.version)
        self._table.tell_states(generation.spec.name)
        return True

    def is_complete(self, load: Load) -> bool:
        """Whether all of a load is ready; then requests are for it from now on."""
        if any(one.state is not GenerationState.READY for one in load.generations):
            return False
        versions = {one.spec.version for one in load.generations}
        served = self._table.served(load.model)
        old = [one for one in served if load.replaces or one.spec.version in versions]
        for generation in load.generations:
            generation.served = True
        self._serve(load.model, old)
        logger.info("model %s is loaded", load.model)
        return True

    def fail(self, load: Load, spec: ModelSpec, reason: str) -> None:
        """An instance of that declaration could not be started: nothing of the load stays."""
        self._table.drop(load.generations)
        if load.replaces:  # a version that could not be bound does not exist
            self._table.index.unavailable(spec.name, spec.version, reason)
        self._table.tell_states(spec.name)
        logger.error("model %s could not be loaded: %s", load.model, reason)
