"""Which instance may run, where a server limits rates."""

from __future__ import annotations

from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import model_spec

from gpuserve import Server
from gpuserve.config.settings.checks import check_rates, resource_limits
from gpuserve.config.settings.server import ResourceLimit, ServerSettings
from gpuserve.core.errors import ConfigError, StartupError
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.rate_limiter import (
    InstanceRate,
    RateLimitedSource,
    SharedResources,
)
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.model.spec import (
    BatchingSpec,
    InstanceSpec,
    ModelSpec,
    QueueSpec,
    Resource,
)
from gpuserve.model.spec import (
    RateLimiter as Rate,
)


def rate(priority: int = 0, **resources: int) -> Rate:
    return Rate(tuple(Resource(name, count) for name, count in resources.items()), priority)


def spec(name: str, *rates: Rate, device: str = "cpu") -> ModelSpec:
    instances = tuple(InstanceSpec(str(number), device, {}, one) for number, one in enumerate(rates))
    return ModelSpec(name, (), (), 0, instances)


class Limited:
    """Instances by name, and which of them have been woken."""

    def __init__(self, limits: list[str], **rates: Rate) -> None:
        self.limiter = SharedResources(ResourceLimit.parse(one) for one in limits)
        self.woken: list[str] = []
        self.instances: dict[str, InstanceRate] = {}
        for name, one in rates.items():
            self.add(name, one)

    def add(self, name: str, one: Rate) -> None:
        made = self.limiter.add(spec(name, one).instances, lambda: self.woken.append(name))
        self.instances[name] = made["0"]

    def acquire(self, name: str) -> bool:
        return self.limiter.acquire(self.instances[name])

    def release(self, name: str, **more: Any) -> list[str]:
        self.woken.clear()
        self.limiter.release(self.instances[name], **more)
        return list(self.woken)


def test_there_is_as_much_as_is_needed_most() -> None:
    limited = Limited([], a=rate(R=2), b=rate(R=1), c=rate(R=1), d=rate())
    assert limited.acquire("b")
    assert limited.acquire("c")
    assert limited.acquire("d")
    assert not limited.acquire("a")
    assert limited.release("b") == []
    assert limited.release("c") == ["a"]
    assert limited.acquire("a")


def test_the_operator_says_how_much_there_is() -> None:
    limited = Limited(["R:3"], a=rate(R=2), b=rate(R=1), c=rate(R=1))
    assert [limited.acquire(one) for one in "abc"] == [True, True, False]


def test_the_lowest_count_times_priority_goes_first() -> None:
    limited = Limited([], a=rate(1, R=1), b=rate(3, R=1), busy=rate(R=1))
    served: list[str] = []
    assert limited.acquire("busy")
    for _ in range(8):
        running = served[-1] if served else "busy"
        for name in "ab":
            if name != running:
                assert not limited.acquire(name)
        if running != "busy":
            assert not limited.acquire(running)
        (woken,) = limited.release(running)
        assert limited.acquire(woken)
        served.append(woken)
    assert served.count("a") == 6
    assert served.count("b") == 2


def test_what_needs_much_is_not_starved() -> None:
    limited = Limited([], a=rate(R=2), b=rate(R=1), c=rate(R=1))
    assert limited.acquire("b")
    assert not limited.acquire("a")
    assert not limited.acquire("c"), "it would take what a waits for"
    assert limited.release("b") == ["a"]
    assert not limited.acquire("b")


def test_what_is_reserved_and_not_wanted_goes_to_the_next() -> None:
    limited = Limited([], a=rate(R=1), b=rate(R=1), c=rate(R=1))
    assert limited.acquire("a")
    assert not limited.acquire("b")
    assert not limited.acquire("c")
    assert limited.release("a") == ["b"]
    limited.woken.clear()
    limited.limiter.withdraw(limited.instances["b"])
    assert limited.woken == ["c"]
    assert limited.acquire("c")
    assert limited.release("c", unused=True) == []
    assert limited.instances["c"].executions == 0


def test_a_model_that_is_gone_waits_no_more() -> None:
    limited = Limited([], a=rate(R=1), b=rate(R=1))
    assert limited.acquire("a")
    assert not limited.acquire("b")
    limited.limiter.remove([limited.instances["b"]])
    assert limited.release("a") == []


def test_resources_are_there_once_a_device_or_once_for_all() -> None:
    limiter = SharedResources([ResourceLimit("D", 1, "cuda:1")])
    shared = Rate((Resource("S", 1, shared=True),))
    cpu = limiter.add(spec("cpu", rate(D=1), shared).instances, print)
    gpu = limiter.add(spec("gpu", rate(D=1), shared, device="cuda:1").instances, print)
    assert limiter.acquire(cpu["0"])
    assert limiter.acquire(gpu["0"])
    assert limiter.acquire(cpu["1"])
    assert not limiter.acquire(gpu["1"])


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_never_more_than_there_is_and_everybody_in_the_end(data: st.DataObject) -> None:
    names = "abcde"
    resource = st.dictionaries(st.sampled_from(["R", "S"]), st.integers(1, 3), max_size=2)
    limits = data.draw(st.lists(st.sampled_from(["R:3", "S:4"]), unique=True))
    rates = {name: rate(data.draw(st.integers(0, 3)), **data.draw(resource)) for name in names}
    limited = Limited(limits, **rates)
    running: list[str] = []
    for _ in range(30):
        name = data.draw(st.sampled_from(names))
        if name in running:
            running.remove(name)
            limited.release(name)
        elif limited.acquire(name):
            running.append(name)
        taken = {key: sum(dict(_needs(rates[one])).get(key, 0) for one in running) for key in ("R", "S")}
        assert taken["R"] <= (
            3 if "R:3" in limits else max(dict(_needs(one)).get("R", 0) for one in rates.values())
        )
        assert taken["S"] <= (
            4 if "S:4" in limits else max(dict(_needs(one)).get("S", 0) for one in rates.values())
        )
    waiting = [name for name in names if name not in running and not limited.acquire(name)]
    running += [name for name in names if name not in running and name not in waiting]
    for _ in range(2 * len(names)):
        if running:
            limited.release(running.pop())
        for name in [one for one in waiting if limited.acquire(one)]:
            waiting.remove(name)
            running.append(name)
    assert waiting == []


def _needs(one: Rate) -> list[tuple[str, int]]:
    return [(resource.name, resource.count) for resource in one.resources]


# ---- the scheduler of a model below the limits ------------------------------------------------


class Model:
    """A model with its requests, below a limiter that it shares."""

    def __init__(self, limiter: SharedResources, name: str, *rates: Rate, delay_us: int = 0) -> None:
        self.woken = 0
        self.scheduler = ModelScheduler(
            model_spec(
                max_batch_size=4,
                batching=BatchingSpec(delay_us),
                queue=QueueSpec(),
                prefetch=0,
                retry_on_worker_death=False,
            )
        )
        self.batches = RateLimitedSource(self.scheduler, spec(name, *rates).instances, limiter, self.wake)
        for number in range(len(rates)):
            self.scheduler.instance_up(str(number))

    def wake(self) -> None:
        self.woken += 1

    def submit(self, now: float = 0.0) -> QueuedRequest:
        request = QueuedRequest(1, 1, "")
        self.scheduler.submit(request, now)
        return request


def test_a_model_waits_for_another_and_is_woken() -> None:
    limiter = SharedResources([])
    first, second = Model(limiter, "a", rate(R=1)), Model(limiter, "b", rate(R=1))
    first.submit()
    second.submit()
    batch = first.batches.next_batch(0.0)
    assert batch is not None
    assert second.batches.next_batch(0.0) is None
    assert second.batches.next_wakeup(0.0) is None, "time alone changes nothing"
    first.batches.complete(batch.batch_id)
    assert second.woken == 1
    assert second.batches.next_batch(0.0) is not None


def test_instances_run_one_after_the_other_and_batches_are_formed_late() -> None:
    model = Model(SharedResources([]), "a", rate(R=1), rate(R=1))
    model.submit()
    batch = model.batches.next_batch(0.0)
    assert batch is not None
    for _ in range(3):
        model.submit()
        assert model.batches.next_batch(0.0) is None
    model.batches.complete(batch.batch_id)
    later = model.batches.next_batch(0.0)
    assert later is not None
    assert len(later.requests) == 3


def test_a_model_that_waits_for_its_delay_holds_nothing() -> None:
    limiter = SharedResources([])
    patient, other = Model(limiter, "a", rate(R=1), delay_us=100), Model(limiter, "b", rate(R=1))
    patient.submit()
    assert patient.batches.next_batch(0.0) is None
    assert patient.batches.next_wakeup(0.0) == pytest.approx(100e-6)
    other.submit()
    assert other.batches.next_batch(0.0) is not None


def test_a_dead_instance_gives_back_what_it_had() -> None:
    limiter = SharedResources([])
    first, second = Model(limiter, "a", rate(R=1)), Model(limiter, "b", rate(R=1))
    first.submit()
    second.submit()
    assert first.batches.next_batch(0.0) is not None
    assert second.batches.next_batch(0.0) is None
    assert len(first.batches.instance_down("0")) == 1
    assert second.woken == 1
    assert second.batches.next_batch(0.0) is not None
    first.batches.close()


# ---- what cannot be ---------------------------------------------------------------------------

ON = ServerSettings(rate_limit="execution_count", rate_limit_resources=("R:2", "G:1:0"))


def test_too_little_of_a_resource_is_refused() -> None:
    text = (
        'Resource count for "R" is limited to 2 which will prevent scheduling of one or more model '
        "instances, the minimum required count is 3"
    )
    with pytest.raises(StartupError) as refused:
        check_rates([spec("a", rate(R=1)), spec("b", rate(R=3))], ON)
    assert str(refused.value) == text
    check_rates([spec("b", rate(R=3))], ServerSettings())
    with pytest.raises(StartupError, match='"G" is limited to 1'):
        check_rates([spec("a", rate(G=2), device="cuda:0")], ON)
    check_rates([spec("a", rate(G=2), device="cuda:1")], ON)


def test_a_resource_of_both_kinds_is_refused() -> None:
    shared = Rate((Resource("X", 1, shared=True),))
    text = 'Resource "X" is present as both global and device-specific resource in the model configuration.'
    with pytest.raises(StartupError) as refused:
        check_rates([spec("a", rate(X=1)), spec("b", shared)], ON)
    assert str(refused.value) == text


@pytest.mark.parametrize("text", ["", "R", "R:", "R:x", ":1", "R:-1"])
def test_a_limit_says_how_much_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a resource as 'name:count'"):
        ResourceLimit.parse(text)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="rate_limit must be one of 'off' or 'execution_count', got 'on'"):
        Server(rate_limit="on")
    with pytest.raises(ConfigError, match="rate_limit_resources: expected a resource as 'name:count'"):
        Server(rate_limit_resources=("R",))


def test_limits_are_off_unless_asked_for() -> None:
    assert resource_limits(ServerSettings(rate_limit_resources=("R:2",))) is None
    assert resource_limits(ON) == (ResourceLimit("R", 2), ResourceLimit("G", 1, "cuda:0"))
