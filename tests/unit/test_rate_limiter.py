"""Which instance may run, where a server limits rates."""

from __future__ import annotations

from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from present import present
from scheduled import model_spec

from gpuserve import Server
from gpuserve.config.settings.checks import check_rates, resource_limits
from gpuserve.config.settings.server import ResourceLimit, ServerSettings
from gpuserve.core.errors import ConfigError, StartupError
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.rate_limiter import InstanceRate, RateLimitedSource, SharedResources
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.model.spec import BatchingSpec, InstanceSpec, ModelSpec, Resource
from gpuserve.model.spec import RateLimiter as Rate


def rate(priority: int = 0, **resources: int) -> Rate:
    return Rate(tuple(Resource(name, count) for name, count in resources.items()), priority)


def spec(name: str, *rates: Rate, device: str = "cpu") -> ModelSpec:
    instances = tuple(InstanceSpec(str(number), device, {}, one) for number, one in enumerate(rates))
    return ModelSpec(name, (), (), 0, instances)


class Limited:
    """Instances by name, and which of them have been woken; some have acquired their resources."""

    def __init__(self, limits: list[str], acquired: str = "", **rates: Rate) -> None:
        self.limiter = SharedResources(ResourceLimit.parse(one) for one in limits)
        self.woken: list[str] = []
        self.instances: dict[str, InstanceRate] = {}
        for name, one in rates.items():
            self.add(name, one)
        assert all(self.acquire(name) for name in acquired)

    def add(self, name: str, one: Rate) -> None:
        made = self.limiter.add(spec(name, one).instances, lambda: self.woken.append(name))
        self.instances[name] = made["0"]

    def acquire(self, name: str) -> bool:
        return self.limiter.acquire(self.instances[name])

    def release(self, name: str, **more: Any) -> list[str]:
        self.woken.clear()
        self.limiter.release(self.instances[name], **more)
        return list(self.woken)


def test_there_is_as_much_as_is_needed_most_or_as_the_operator_says() -> None:
    limited = Limited([], "bcd", a=rate(R=2), b=rate(R=1), c=rate(R=1), d=rate())
    assert not limited.acquire("a")
    assert limited.release("b") == []
    assert limited.release("c") == ["a"]
    assert limited.acquire("a")
    limited = Limited(["R:3"], "ab", a=rate(R=2), b=rate(R=1), c=rate(R=1))
    assert not limited.acquire("c")


def test_the_lowest_count_times_priority_goes_first() -> None:
    limited = Limited([], a=rate(1, R=1), b=rate(3, R=1), busy=rate(R=1))
    assert limited.acquire("busy")
    served = ["busy"]
    for _ in range(8):
        assert not any(limited.acquire(name) for name in "ab" if name != served[-1])
        assert served == ["busy"] or not limited.acquire(served[-1])
        served += limited.release(served[-1])
        assert limited.acquire(served[-1])
    assert (len(served), served.count("a"), served.count("b")) == (9, 6, 2)


def test_what_needs_much_is_not_starved() -> None:
    limited = Limited([], "b", a=rate(R=2), b=rate(R=1), c=rate(R=1))
    assert not limited.acquire("a")
    assert not limited.acquire("c"), "it would take what a waits for"
    assert limited.release("b") == ["a"]
    assert not limited.acquire("b")


def test_what_is_reserved_and_not_wanted_goes_to_the_next_and_a_model_that_is_gone_waits_no_more() -> None:
    limited = Limited([], "a", a=rate(R=1), b=rate(R=1), c=rate(R=1))
    assert not limited.acquire("b")
    assert not limited.acquire("c")
    assert limited.release("a") == ["b"]
    limited.woken.clear()
    limited.limiter.withdraw(limited.instances["b"])
    assert limited.woken == ["c"]
    assert limited.acquire("c")
    assert limited.release("c", unused=True) == []
    assert limited.instances["c"].executions == 0
    limited = Limited([], "a", a=rate(R=1), b=rate(R=1))
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
        for key, limit in (("R", 3), ("S", 4)):
            needs = {one: dict(_needs(rates[one])).get(key, 0) for one in names}
            most = limit if f"{key}:{limit}" in limits else max(needs.values())
            assert sum(needs[one] for one in running) <= most
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
    """A model with its requests, below a limiter that it shares; one request waits at first."""

    def __init__(self, limiter: SharedResources, name: str, *rates: Rate, delay_us: int = 0) -> None:
        self.woken = 0
        spec_ = model_spec(
            max_batch_size=4, batching=BatchingSpec(delay_us), prefetch=0, retry_on_worker_death=False
        )
        self.scheduler = ModelScheduler(spec_)
        self.batches = RateLimitedSource(self.scheduler, spec(name, *rates).instances, limiter, self.wake)
        for number in range(len(rates)):
            self.scheduler.instance_up(str(number))
        self.submit()

    def wake(self) -> None:
        self.woken += 1

    def submit(self) -> None:
        self.scheduler.submit(QueuedRequest(1, 1, ""), 0.0)


def two_models(delay_us: int = 0) -> tuple[Model, Model]:
    """Two models, one of which may run at a time; the first waits so long for company."""
    limiter = SharedResources([])
    return Model(limiter, "a", rate(R=1), delay_us=delay_us), Model(limiter, "b", rate(R=1))


@pytest.mark.parametrize("dies", [False, True])
def test_a_model_waits_for_another_and_is_woken(dies: bool) -> None:
    first, second = two_models()
    batch = present(first.batches.next_batch(0.0))
    assert second.batches.next_batch(0.0) is None
    assert second.batches.next_wakeup(0.0) is None, "time alone changes nothing"
    if dies:
        assert len(first.batches.instance_down("0")) == 1
    else:
        first.batches.complete(batch.batch_id)
    assert second.woken == 1
    assert second.batches.next_batch(0.0) is not None
    first.batches.close()


def test_instances_run_one_after_the_other_and_batches_are_formed_late() -> None:
    model = Model(SharedResources([]), "a", rate(R=1), rate(R=1))
    batch = present(model.batches.next_batch(0.0))
    for _ in range(3):
        model.submit()
        assert model.batches.next_batch(0.0) is None
    model.batches.complete(batch.batch_id)
    later = present(model.batches.next_batch(0.0))
    assert len(later.requests) == 3


def test_a_model_that_waits_for_its_delay_holds_nothing() -> None:
    patient, other = two_models(delay_us=100)
    assert patient.batches.next_batch(0.0) is None
    assert patient.batches.next_wakeup(0.0) == pytest.approx(100e-6)
    assert other.batches.next_batch(0.0) is not None


# ---- what cannot be ---------------------------------------------------------------------------

ON = ServerSettings(rate_limit="execution_count", rate_limit_resources=("R:2", "G:1:0"))


def refused(*specs: ModelSpec) -> str:
    with pytest.raises(StartupError) as error:
        check_rates(specs, ON)
    return str(error.value)


def test_too_little_of_a_resource_and_one_of_both_kinds_are_refused() -> None:
    assert refused(spec("a", rate(R=1)), spec("b", rate(R=3))) == (
        'Resource count for "R" is limited to 2 which will prevent scheduling of one or more model '
        "instances, the minimum required count is 3"
    )
    check_rates([spec("b", rate(R=3))], ServerSettings())
    assert '"G" is limited to 1' in refused(spec("a", rate(G=2), device="cuda:0"))
    check_rates([spec("a", rate(G=2), device="cuda:1")], ON)
    assert refused(spec("a", rate(X=1)), spec("b", Rate((Resource("X", 1, shared=True),)))) == (
        'Resource "X" is present as both global and device-specific resource in the model configuration.'
    )


@pytest.mark.parametrize("text", ["", "R", "R:", "R:x", ":1", "R:-1"])
def test_a_limit_says_how_much_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a resource as 'name:count'"):
        ResourceLimit.parse(text)


def test_limits_are_off_unless_asked_for_and_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="rate_limit must be one of 'off' or 'execution_count', got 'on'"):
        Server(rate_limit="on")
    with pytest.raises(ConfigError, match="rate_limit_resources: expected a resource as 'name:count'"):
        Server(rate_limit_resources=("R",))
    assert resource_limits(ServerSettings(rate_limit_resources=("R:2",))) is None
    assert resource_limits(ON) == (ResourceLimit("R", 2), ResourceLimit("G", 1, "cuda:0"))
