"""The shared weights of a server's workers. The supervisor holds the descriptors of sealed memory and
of device memory, and hands them to workers. It maps no memory and reads none, so nothing that a worker writes
can harm it, and it does not use CUDA.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from gpuserve.core.states import StepTable
from gpuserve.devices.names import CPU
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.sealed_memory import ExportedMemory, Ranges, SealedMemory

logger = logging.getLogger(__name__)


class WeightsState(enum.Enum):
    """The states of weights. ASLEEP: the models of all users sleep, so the memory on the device was given
    back, and the next user that wakes lays the weights anew.
    """

    LOADING = "LOADING"
    SHARED = "SHARED"
    ASLEEP = "ASLEEP"


WEIGHTS_STEPS: Final = StepTable(
    "weights",
    {
        WeightsState.LOADING: {WeightsState.SHARED},
        WeightsState.SHARED: {WeightsState.ASLEEP},
        WeightsState.ASLEEP: {WeightsState.LOADING},
    },
)


class WeightsUser(Protocol):
    """An instance that uses weights, through its restarts."""

    @property
    def name(self) -> str:
        """The model and the instance, as "model/instance"."""

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a message to the present worker of the instance."""


@dataclass(eq=False)
class _Weights:
    """Weights of one key. ``users`` are the instances that have asked for them; when the last user leaves,
    they are freed. ``loader`` is the instance that loads them, and ``waiting`` are the others. ``awake`` are
    the users that map ``device``, the memory of the tensors on a device, or will map it after a restart.
    """

    loader: WeightsUser
    users: set[WeightsUser]
    state: WeightsState = WeightsState.LOADING
    waiting: list[WeightsUser] = field(default_factory=list)
    memory: SealedMemory | None = None
    ranges: Ranges = ()
    device: ExportedMemory | None = None
    #: The UUID of the device that has or had the memory, or "cpu".
    place: str = CPU
    awake: set[WeightsUser] = field(default_factory=set)
    #: Whether the process that loaded the weights lives: the driver counts the device memory as its own.
    loader_lives: bool = True

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors, on a device or in memory of the host."""
        memory = self.device or self.memory
        return 0 if memory is None else memory.nbytes

    def send(self, key: str, user: WeightsUser) -> None:
        """Send the memory to an instance."""
        assert self.memory is not None, "the weights are loaded"
        if self.device is None:
            user.send(wire.Weights(key, self.ranges), (self.memory.fd,))
        else:
            message = wire.Weights(key, self.ranges, self.device.uuid, self.device.nbytes)
            user.send(message, (self.memory.fd, self.device.fd))


class DeviceWeights(NamedTuple):
    """Weights in memory of the device with this UUID, and their users. The driver counts the memory as that
    of the process of ``owner``, or of no process.
    """

    key: str
    uuid: str
    nbytes: int
    users: Set[WeightsUser]
    owner: WeightsUser | None


class SharedWeights:
    """All weights of a server, or of an attached program, by key."""

    def __init__(self) -> None:
        #: Called when ``document()`` has changed.
        self.on_changed: Callable[[], None] = lambda: None
        self._weights: dict[str, _Weights] = {}
        #: The keys that the present worker of each instance has asked for.
        self._asked: dict[WeightsUser, set[str]] = {}

    def document(self) -> list[dict[str, Any]]:
        """Return a row for each of the weights: name, the UUID of the device or "cpu", state, bytes, and the
        instances that use them.
        """
        return [
            {
                "name": name_of(key),
                "device": one.place,
                "state": one.state.value,
                "nbytes": one.nbytes,
                "instances": sorted(user.name for user in one.users),
            }
            for key, one in self._weights.items()
        ]

    def on_devices(self) -> list[DeviceWeights]:
        """Return the weights that are in memory of a device now."""
        return [
            DeviceWeights(key, one.place, one.nbytes, one.users, one.loader if one.loader_lives else None)
            for key, one in self._weights.items()
            if one.device is not None
        ]

    def request(self, user: WeightsUser, key: str) -> None:
        """Send an instance the weights of a key, ask it to load them, or let it wait for the loader."""
        self._asked.setdefault(user, set()).add(key)
        found = self._weights.get(key)
        if found is None:
            self._weights[key] = _Weights(user, {user}, awake={user})
            user.send(wire.LoadWeights(key))
            return
        found.users.add(user)
        found.awake.add(user)
        if found.state is WeightsState.SHARED:
            found.send(key, user)
        elif found.state is WeightsState.ASLEEP:
            found.state = WEIGHTS_STEPS.step(found.state, WeightsState.LOADING, name_of(key))
            found.loader = user
            user.send(wire.LoadWeights(key))
        else:
            found.waiting.append(user)
        self.on_changed()

    def slept(self, user: WeightsUser, key: str) -> None:
        """Note that an instance has unmapped the device memory of a key. Free the memory if no instance maps
        it.
        """
        if (found := self._weights.get(key)) is not None:
            found.awake.discard(user)
            self._free_unmapped(key, found)

    def _free_unmapped(self, key: str, weights: _Weights) -> None:
        if weights.device is not None and not weights.awake and weights.state is WeightsState.SHARED:
            weights.state = WEIGHTS_STEPS.step(weights.state, WeightsState.ASLEEP, name_of(key))
            weights.device = None  # the last reference to the memory
            self.on_changed()

    def hold(self, user: WeightsUser, name: str, memory: SealedMemory) -> None:
        """Note that an instance uses memory that its callable was pickled to."""
        key = f"{name}\n{id(memory)}"
        self._asked.setdefault(user, set()).add(key)
        held = self._weights.setdefault(key, _Weights(user, set(), WeightsState.SHARED, memory=memory))
        held.users.add(user)
        self.on_changed()

    def publish(
        self,
        user: WeightsUser,
        key: str,
        memory: SealedMemory,
        ranges: Ranges,
        device: ExportedMemory | None = None,
    ) -> None:
        """Store the weights an instance loaded and send them to those waiting; WireError if not asked."""
        found = self._loaded_by(user, key)
        found.state = WEIGHTS_STEPS.step(found.state, WeightsState.SHARED, name_of(key))
        found.memory, found.ranges, found.device, found.loader_lives = memory, ranges, device, True
        found.place = CPU if device is None else device.uuid
        what = name_of(key), user.name, found.nbytes, found.place
        logger.info("shared weights %s: %s loaded %d bytes on %s", *what)
        waiting, found.waiting = found.waiting, []
        for one in waiting:
            found.send(key, one)
        self.on_changed()

    def failed(self, user: WeightsUser, key: str) -> None:
        """Let the next waiting instance load, because the loader failed. If an instance could not map memory
        of a device, as after a reset of the device, let the next instance load again. Raise as ``publish``.
        """
        found = self._weights.get(key)
        if found is not None and found.device is not None and user in found.users:
            del self._weights[key]
            self.on_changed()
        else:
            self._replace_loader(key, self._loaded_by(user, key))

    def gpu_lost(self, uuid: str) -> None:
        """Close the descriptors of memory of a lost GPU, whose instances have ended or end now."""
        lost = [key for key, one in self._weights.items() if one.device and uuid.endswith(one.device.uuid)]
        for key in lost:
            del self._weights[key]
            self.on_changed()

    def _loaded_by(self, user: WeightsUser, key: str) -> _Weights:
        found = self._weights.get(key)
        if found is None or found.state is not WeightsState.LOADING or found.loader is not user:
            raise wire.WireError(f"weights {name_of(key)!r}, which this worker was not asked to load")
        return found

    def _replace_loader(self, key: str, weights: _Weights) -> None:
        weights.users.discard(weights.loader)
        if not weights.waiting:
            del self._weights[key]
            return
        weights.loader = weights.waiting.pop(0)
        weights.loader.send(wire.LoadWeights(key))

    def worker_ended(self, user: WeightsUser) -> None:
        """Note the end of an instance's worker, which loads nothing; the instance keeps its weights."""
        self._asked.pop(user, None)
        for key, one in list(self._weights.items()):
            one.waiting = [waiting for waiting in one.waiting if waiting is not user]
            if one.loader is not user:
                continue
            one.loader_lives = False
            if one.state is WeightsState.LOADING:
                self._replace_loader(key, one)

    def worker_ready(self, user: WeightsUser) -> None:
        """Free weights that an earlier worker of an instance asked for, and its loaded worker did not."""
        self._release(user, self._asked.get(user, set()))

    def instance_ended(self, user: WeightsUser) -> None:
        """Free the weights of an instance that gets no further worker."""
        self.worker_ended(user)
        self._release(user, set())

    def _release(self, user: WeightsUser, kept: set[str]) -> None:
        for key, one in list(self._weights.items()):
            if user in one.users and key not in kept:
                one.users.remove(user)
                one.awake.discard(user)
                if not one.users:
                    del self._weights[key]  # and with it the last reference to the memory
                self._free_unmapped(key, one)
                self.on_changed()


def name_of(key: str) -> str:
    """Return the name that the author gave weights."""
    return key.partition("\n")[0]
