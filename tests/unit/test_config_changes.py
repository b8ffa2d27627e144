"""What a reload of the config has to do, in which order, and what it says: without processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import pytest
from reloading import Work, config, ensemble, model

from gpuserve.core.errors import GpuserveError, StartupError, Unavailable
from gpuserve.model.spec import ensemble_members
from gpuserve.supervisor.reload.config_changes import Action, ConfigModels, actions, even_count, needs
from gpuserve.supervisor.reload.config_reload import AppliedModels, ConfigReport, ConfigRun


def found(
    before: ConfigModels,
    now: ConfigModels,
    served: Iterable[str] | None = None,
    touched: Collection[str] = (),
) -> dict[str, Action]:
    names = before.wanted if served is None else set(served)
    return actions(before, now, lambda name: name in names, touched)


# ---- what has to be done -----------------------------------------------------------------------


def test_what_is_as_it_was_is_not_touched() -> None:
    same = config(model("a"), ensemble("e", "a"))
    assert found(same, same) == {}
    assert found(same, same, served=[]) == {}  # unloaded by hand


def test_each_change_has_its_action() -> None:
    before = config(model("stays"), model("goes"), model("changes"), model("grows"))
    two = model("grows", devices=("cpu", "cpu"))
    now = config(model("stays"), model("changes", size=8), two, model("comes"))
    assert found(before, now) == {
        "goes": Action.UNLOAD,
        "changes": Action.RELOAD,
        "grows": Action.SCALE,
        "comes": Action.LOAD,
    }


def test_a_model_whose_files_were_touched_is_loaded_anew() -> None:
    same = config(model("a"), model("b"), wanted=["a"])
    assert found(same, same, touched=["a", "b", "none"]) == {"a": Action.RELOAD}
    assert found(same, same, served=[], touched=["a", "b"]) == {"a": Action.LOAD}
    two = config(model("a", devices=("cpu", "cpu")), model("b"), wanted=["a"])
    assert found(same, two, touched=["a"]) == {"a": Action.RELOAD}
    assert found(same, config(model("b"), wanted=[]), touched=["a"]) == {"a": Action.UNLOAD}


def test_another_device_or_another_version_is_another_load() -> None:
    before = config(model("m"))
    assert found(before, config(model("m", devices=("cpu", "cuda:0")))) == {"m": Action.RELOAD}
    assert found(before, config(model("m"), model("m", version=2))) == {"m": Action.RELOAD}


def test_what_was_unloaded_by_hand_stays_so() -> None:
    before, now = config(model("m")), config(model("m", size=8))
    assert found(before, now, served=[]) == {}
    assert found(before, config(), served=[]) == {}


def test_a_list_of_what_is_loaded_counts() -> None:
    both = (model("a"), model("b"))
    assert found(config(*both, wanted=["a"]), config(*both)) == {"b": Action.LOAD}
    assert found(config(*both), config(*both, wanted=["a"])) == {"b": Action.UNLOAD}
    assert found(config(model("a")), config(*both, wanted=["a"])) == {}
    # A client has loaded b; that the list does not name it is nothing new.
    assert found(config(*both, wanted=["a"]), config(*both, wanted=["a"]), served=["a", "b"]) == {}


def test_an_ensemble_that_is_loaded_brings_its_models() -> None:
    before = config(model("a"), wanted=[])
    now = config(model("a"), ensemble("e", "a"), wanted=["e"])
    assert found(before, now) == {"e": Action.LOAD, "a": Action.LOAD}
    assert found(before, now, served=["a"]) == {"e": Action.LOAD}


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        (["cpu"], 1),
        (["cpu"] * 3, 3),
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], 2),
        (["cuda:0", "cuda:1", "cuda:0"], None),
    ],
)
def test_numbers_that_can_be_had_in_place(devices: list[str], count: int | None) -> None:
    assert even_count([model("m", devices=devices)]) == count


def test_instances_that_are_not_alike_cannot() -> None:
    spec = model("m", devices=("cpu", "cpu"))
    other = dataclasses.replace(spec.instances[1], source={"path": "m.py:g"})
    assert even_count([dataclasses.replace(spec, instances=(spec.instances[0], other))]) is None
    assert even_count([model("m"), model("m", version=2, devices=("cpu", "cpu"))]) is None


# ---- in which order ----------------------------------------------------------------------------

NESTED = config(model("a"), model("b"), ensemble("inner", "a"), ensemble("outer", "inner", "b"))


def test_members_are_those_of_members_too() -> None:
    assert set(ensemble_members("outer", NESTED.declared.get)) == {"inner", "a", "b"}
    assert ensemble_members("a", NESTED.declared.get) == []


def test_members_come_before_and_go_after() -> None:
    loads = dict.fromkeys(NESTED.declared, Action.LOAD)
    first = needs(loads, {}, NESTED.declared)
    assert first == {"a": set(), "b": set(), "inner": {"a"}, "outer": {"inner", "a", "b"}}
    unloads = dict.fromkeys(NESTED.declared, Action.UNLOAD)
    assert needs(unloads, NESTED.declared, {}) == {
        "a": {"inner", "outer"},
        "b": {"outer"},
        "inner": {"outer"},
        "outer": set(),
    }


# ---- the whole of it ---------------------------------------------------------------------------


class Run:
    """A run, begun."""

    def __init__(self, work: Work, before: ConfigModels, now: ConfigModels) -> None:
        self.applied = AppliedModels(before)
        self.report = ConfigReport()
        self.ended = 0
        self.refusal: GpuserveError | None = None
        self.run = ConfigRun(work, self.applied, now, self.report, lambda: self.refusal, self.on_end)  # type: ignore[arg-type]
        self.run.start()

    def on_end(self) -> None:
        self.ended += 1


def test_unloads_come_last_and_all_is_applied() -> None:
    before = config(model("a"), model("old"))
    now = config(model("a", size=8), model("new"))
    work = Work("a", "old")
    run = Run(work, before, now)
    assert (set(work.begun), work.names) == ({"a", "new"}, ["new", "old"])
    work.end("new")
    work.end("a")
    assert (set(work.begun), run.ended) == ({"old"}, 0)
    work.end("old")
    assert run.ended == 1
    assert run.applied.snapshot() == now
    assert run.report.outcome() == ("", "", run.report.result)
    told = {key: names for key, names in run.report.result.items() if names}
    assert told == {"loaded": ["new"], "reloaded": ["a"], "unloaded": ["old"]}


def test_what_fails_is_tried_again_by_the_next_one() -> None:
    before, now = config(model("a")), config(model("a", size=8), model("new"))
    work = Work("a")
    run = Run(work, before, now)
    work.end("a", StartupError("there are no weights"))
    work.end("new", StartupError("no such module"))
    assert run.ended == 1
    assert run.applied.snapshot() == before
    assert run.report.outcome().text == "model a: there are no weights\nmodel new: no such module"
    assert run.report.outcome().code == "INVALID_ARGUMENT"
    again = Run(work, run.applied.snapshot(), now)
    assert set(work.begun) == {"a", "new"}
    work.end("a")
    work.end("new")
    assert again.applied.snapshot() == now


def test_a_model_that_an_ensemble_still_needs_is_not_unloaded() -> None:
    before = config(model("a"), ensemble("e", "a"))
    now = config(model("b"), ensemble("e", "b"))
    work = Work("a", "e")
    run = Run(work, before, now)
    work.end("b", StartupError("no such module"))
    assert (run.ended, work.begun) == (1, {})
    assert run.report.result["failed"] == [
        {"model": "b", "text": "no such module"},
        {"model": "e", "text": "it stays as it was, because model b, which it needs, failed"},
        {"model": "a", "text": "not unloaded, because model e needs it"},
    ]
    assert run.applied.snapshot() == before


def test_an_ensemble_goes_before_its_models() -> None:
    work = Work(*NESTED.declared)
    run = Run(work, NESTED, config())
    for _ in range(4):
        (*_, name) = work.begun
        assert not run.ended
        work.end(name)
    assert work.order.index("outer") < work.order.index("inner") < work.order.index("a")
    assert run.ended == 1


def test_numbers_that_cannot_be_had_in_place_are_loaded() -> None:
    before, now = config(model("m")), config(model("m", devices=("cpu", "cpu")))
    work = Work("m")
    assert Run(work, before, now).report.is_empty
    assert work.begun.pop("m")[0] is Action.SCALE
    work.even = False
    Run(work, before, now)
    assert work.begun["m"][0] is Action.RELOAD


def test_a_server_that_ends_begins_nothing_more() -> None:
    before = config(model("a"))
    work = Work("a")
    run = Run(work, before, config(model("a", size=8), ensemble("e", "a")))
    run.refusal = Unavailable("Server exiting")
    work.end("a")
    assert (run.ended, run.report.result["failed"]) == (1, [{"model": "e", "text": "Server exiting"}])


def test_nothing_to_do_is_said() -> None:
    same = config(model("a"))
    run = Run(Work("a"), same, same)
    assert run.ended == 1
    assert (run.report.outcome().code, run.report.outcome().text) == ("", "nothing has changed")
