"""A reload of the config as those see it who ask for it, without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from reloading import Work, model

from gpuserve.config.settings.server import ServerSettings
from gpuserve.core.errors import ConfigError, GpuserveError
from gpuserve.core.event_log import EventLog
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.control.operator_protocol import VerbOutcome
from gpuserve.supervisor.processes.lifecycle import ServerLifecycle, ServerState
from gpuserve.supervisor.reload.config_reload import ConfigReload


class Said(NamedTuple):
    """What a config file says."""

    settings: ServerSettings
    models: tuple[ModelSpec, ...]
    broken: Mapping[str, GpuserveError] = MappingProxyType({})


class File:
    """A config file that can be another one each time, or a wrong one."""

    def __init__(self, *models: ModelSpec) -> None:
        self.path = "config.yaml"
        self.start = self.says = Said(ServerSettings(), models)
        self.problem = ""

    def read_all(self, changed: object = None) -> Said:
        if self.problem:
            raise ConfigError(self.problem)
        return self.says


class Asked:
    """A ``ConfigReload`` and those who ask it."""

    def __init__(self, file: File | None, *served: str) -> None:
        self.work = Work(*served)
        self.events = EventLog()
        self.life = ServerLifecycle(self.events)
        self.life.move(ServerState.STARTING)
        self.adjusted: list[dict[str, Any]] = []
        self.outcomes: list[VerbOutcome] = []
        self.lines: list[str] = []
        self.config = ConfigReload(file, self.life, self.events, self.work, self.adjusted.append, self.run)  # type: ignore[arg-type]

    def run(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        try:
            then(call())
        except GpuserveError as error:
            then(error)

    def serve(self) -> Asked:
        self.life.move(ServerState.SERVING)
        self.config.server_started()
        return self

    def ask(self) -> None:
        self.config.request(self.outcomes.append, self.lines.append)


def serving(*models: ModelSpec) -> tuple[File, Asked]:
    """Return a config file with these models, and a server that serves them."""
    file = File(*models)
    return file, Asked(file, *(one.name for one in models)).serve()


def test_a_server_without_a_file_or_that_does_not_serve_refuses() -> None:
    without = Asked(None).serve()
    without.ask()
    assert without.outcomes[0].text.startswith("this server has no config file that could be read again")
    early = Asked(File())
    early.ask()
    assert (early.outcomes[0].code, early.outcomes[0].text) == ("UNAVAILABLE", "Server not ready")


def test_a_wrong_file_is_told_and_changes_nothing() -> None:
    file, asked = serving(model("a"))
    file.problem = "config.yaml:1:1: no"
    asked.ask()
    (outcome,) = asked.outcomes
    assert (outcome.code, outcome.text) == ("INVALID_ARGUMENT", "config.yaml:1:1: no")
    assert not any(outcome.result.values())
    assert (asked.adjusted, asked.work.begun) == ([], {})


def test_settings_hold_before_models_are_loaded() -> None:
    file, asked = serving(model("a"))
    file.says = Said(ServerSettings(load_timeout_s=5.0, http_port=9), (model("a", size=8),))
    asked.ask()
    assert asked.adjusted == [{"load_timeout_s": 5.0}]
    asked.work.end("a")
    (outcome,) = asked.outcomes
    assert outcome.result["settings"] == ["server.load_timeout_s"]
    assert [one["key"] for one in outcome.result["refused"]] == ["server.http_port"]
    assert asked.lines == ["server.load_timeout_s is 5.0 now, it was 900.0", "model a is reloaded"]
    asked.ask()  # what is refused is told again, and nothing is done again
    assert (outcome.text, asked.adjusted[1:], asked.work.begun) == (asked.outcomes[1].text, [], {})


def test_all_who_ask_during_a_reload_are_answered_by_the_next_one() -> None:
    file, asked = serving(model("a"))
    file.says = Said(ServerSettings(), (model("a", size=8),))
    asked.ask()
    file.says = Said(ServerSettings(), (model("a", size=16), model("b")))
    asked.ask()
    asked.ask()
    asked.work.end("a")
    assert (len(asked.outcomes), set(asked.work.begun)) == (1, {"a", "b"})
    asked.work.end("a")
    asked.work.end("b")
    assert [one.result["loaded"] for one in asked.outcomes] == [[], ["b"], ["b"]]


def test_what_was_loaded_by_name_is_not_loaded_again() -> None:
    file, asked = serving(model("a"))
    file.says = Said(ServerSettings(), (model("a", size=8),))
    asked.config.model_loaded("a", [model("a", size=8)])
    asked.ask()
    assert asked.outcomes[0].text == "nothing has changed"


def test_a_signal_at_the_start_is_due_when_the_server_serves(caplog: pytest.LogCaptureFixture) -> None:
    file = File(model("a"))
    asked = Asked(file, "a")
    file.says = Said(ServerSettings(), (model("b"),))
    asked.config.request_by_signal()
    asked.config.request_by_signal()
    assert asked.work.begun == {}
    asked.serve()
    assert set(asked.work.begun) == {"b"}
    asked.life.move(ServerState.DRAINING)
    asked.config.request_by_signal()
    assert "SIGHUP: Server exiting" in caplog.text


def test_a_model_that_cannot_be_as_it_is_declared_now_stays_as_it_was() -> None:
    file, asked = serving(model("a"), model("b"))
    broken = {"a": ConfigError("a: no"), "new": ConfigError("new: no")}
    file.says = Said(ServerSettings(), (model("b", size=8),), broken)
    asked.config.request_by_files(["a", "b"], lambda _: None)
    assert set(asked.work.begun) == {"b"}
    asked.work.end("b")
    asked.ask()
    (outcome,) = asked.outcomes
    assert outcome.text == "model a: a: no\nmodel new: new: no"
    assert asked.work.undeclared_models == {"a": "a: no", "new": "new: no"}
    file.says = Said(ServerSettings(), (model("a"), model("b", size=8)))
    asked.ask()
    assert asked.work.told >= {"new"}
    assert asked.work.begun == {}


def test_files_that_changed_beside_a_wrong_config_are_loaded_with_the_next() -> None:
    file, asked = serving(model("a"), model("b"))
    file.problem = "config.yaml:1:1: no"
    asked.config.request_by_files(["", "a"], asked.outcomes.append)
    assert (asked.outcomes[0].text, asked.work.begun) == ("config.yaml:1:1: no", {})
    file.problem = ""
    asked.config.request_by_files([""], asked.outcomes.append)
    assert set(asked.work.begun) == {"a"}


def test_a_load_of_files_that_have_changed_again_is_taken_back() -> None:
    _, asked = serving(model("a"), model("b"))
    asked.config.request_by_files(["a", "b"], asked.outcomes.append)
    asked.config.request_by_files(["a"], asked.outcomes.append)
    assert asked.work.taken_back == ["a"]


def test_all_models_are_loaded_anew_when_an_operator_says_so() -> None:
    asked = Asked(File(model("a"), model("b")), "a").serve()
    asked.config.request_all()
    assert set(asked.work.begun) == {"a", "b"}


def test_the_server_may_end_while_the_config_is_read() -> None:
    file, asked = serving(model("a"))
    reads: list[Callable[[], None]] = []
    asked.run = lambda call, then: reads.append(lambda: then(call()))  # type: ignore[method-assign]
    asked.config = ConfigReload(file, asked.life, asked.events, asked.work, asked.adjusted.append, asked.run)  # type: ignore[arg-type]
    file.says = Said(ServerSettings(load_timeout_s=5.0), (model("a", size=8),))
    asked.ask()
    asked.ask()
    assert len(reads) == 1
    asked.life.move(ServerState.DRAINING)
    while reads:
        reads.pop()()
    assert [one.code for one in asked.outcomes] == ["UNAVAILABLE", "UNAVAILABLE"]
    assert (asked.adjusted, asked.work.begun) == ([], {})
