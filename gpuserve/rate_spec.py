"""What an instance needs before it may run, where a server limits rates: ``RateSpec``, a part of
``InstanceSpec``, and the counts that the operator sets. Plain values only, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

OFF: Final = "off"
EXECUTION_COUNT: Final = "execution_count"
#: The name of a resource, and the device where it is; "" for one that all devices share.
Resource: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """So much of a named resource; a ``shared`` one there is once for all devices, others once a device."""

    name: str
    count: int = 1
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RateSpec:
    """What an instance holds while it runs. With ``priority`` n it gets its turn 1/n as often as with 1."""

    resources: tuple[ResourceSpec, ...] = ()
    priority: int = 0

    def needs(self, device: str) -> dict[Resource, int]:
        """How much of each resource an instance on that device needs."""
        needs: dict[Resource, int] = {}
        for one in self.resources:
            resource = (one.name, "" if one.shared else device)
            needs[resource] = needs.get(resource, 0) + one.count
        return needs

    @classmethod
    def from_wire(cls, plain: tuple[Any, ...]) -> RateSpec:
        """The inverse of ``dataclasses.astuple``."""
        resources, priority = plain
        return cls(tuple(ResourceSpec(*one) for one in resources), priority)


NO_RATE: Final = RateSpec()


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """How much of a resource there is: on one device, or with "" on each, and of a shared one in all."""

    name: str
    count: int
    device: str = ""

    @classmethod
    def parse(cls, text: str) -> ResourceLimit:
        """``name:count`` or ``name:count:device``, where a number is that of a GPU.

        Raises:
            ValueError: it has another form; the text says which was expected.
        """
        name, _, rest = text.partition(":")
        count, _, device = rest.partition(":")
        if not name or not count.isascii() or not count.isdigit():
            raise ValueError(
                f"expected a resource as 'name:count' or 'name:count:device', such as 'memory:4' or "
                f"'memory:4:cuda:0', given {text!r}"
            )
        return cls(name, int(count), f"cuda:{device}" if device.isdigit() else device)


def limit_of(resource: Resource, limits: Iterable[ResourceLimit]) -> int | None:
    """What the operator says of a resource: for its device, or else for every one. None: nothing."""
    name, device = resource
    said = {limit.device: limit.count for limit in limits if limit.name == name}
    return said.get(device, said.get(""))
