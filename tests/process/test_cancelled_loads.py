"""Loads that hang: a later request for the model cancels them, and the model stays as it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import ask
from config_operator import fifo, operated
from operated import InBackground
from processes import children, command_line, wait_until
from repositories import clients_are_closed, entry
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here

TAKEN_BACK = "model 'm': the load was cancelled by a later operation"


@pytest.mark.thorough
def test_a_load_that_hangs_is_taken_back_by_what_is_asked_for_after_it(tmp_path: Path) -> None:
    never = str(fifo(tmp_path, "never"))
    with operated(tmp_path, entry("m", 1.0), model_control="explicit") as operator:
        address, client = operator.server.addresses["HTTP"], operator.client()

        def hang(verb: str, **arguments: str) -> InBackground:
            wait_until(lambda: len(operator.server.workers) == 1, "what was before has ended")
            operator.write(entry("m", 2.0, load_fifo=never), model_control="explicit")
            asked = InBackground(ask, address, verb, **arguments)
            wait_until(lambda: len(operator.server.workers) == 2, "it loads")
            return asked

        # The config, and the config when it is corrected.
        first = hang("reload")
        operator.write(entry("m", 3.0), model_control="explicit")
        assert ask(address, "reload").code == ""
        assert TAKEN_BACK in first.result().text
        assert client.infer("m").tag == 3.0
        # By its name, and again.
        second = hang("reload", model="m")
        operator.write(entry("m", 4.0), model_control="explicit")
        assert ask(address, "reload", model="m").code == ""
        assert (second.result().code, TAKEN_BACK in second.result().text) == ("CANCELLED", True)
        assert client.infer("m").tag == 4.0
        # A client's word is enough to be rid of it.
        third = hang("reload", model="m")
        client.asked.unload_model("m")
        assert TAKEN_BACK in third.result().text
        with pytest.raises(InferenceServerException, match="no available versions"):
            client.infer("m")
        wait_until(lambda: not operator.server.workers, "nothing of it is left")


@pytest.mark.thorough
def test_a_model_that_hangs_when_it_is_asked_holds_only_its_own_load_up(tmp_path: Path) -> None:
    gate = fifo(tmp_path, "gate")
    (tmp_path / "new.py").write_text(f"open({str(gate)!r}).read()\n")
    with operated(tmp_path, entry("m", 1.0), model_control="explicit") as operator:
        server, client = operator.server, operator.client()

        def asked() -> list[int]:
            return [
                one for one in children(server.pid) if "gpuserve.model.describe_child" in command_line(one)
            ]

        new = {"name": "new", "callable": "new.py:double"}
        operator.write(entry("m", 1.0), new, model_control="explicit")
        loading = InBackground(client.asked.load_model, "new")
        wait_until(lambda: len(asked()) == 1, "it is asked")
        (worker,) = server.workers
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: server.workers not in ([], [worker]), "another worker is started")
        server.wait_model_ready("m")
        client.asked.unload_model("new")
        with pytest.raises(InferenceServerException, match="model 'new': the load was cancelled"):
            loading.result()
        for one in asked():
            os.kill(one, signal.SIGKILL)
        (tmp_path / "new.py").write_text(
            "from gpuserve.typed import Float32, batch\n\n@batch\ndef double(x: Float32) -> Float32:\n"
            "    return 2 * x\n"
        )
        client.asked.load_model("new")
        server.wait_model_ready("new")
        assert server.end() == 0


@pytest.mark.thorough
def test_instances_that_hang_while_they_come_are_taken_back(tmp_path: Path) -> None:
    gate = fifo(tmp_path, "gate")
    with operated(tmp_path, entry("m", 1.0), model_control="explicit") as operator:
        address, client = operator.server.addresses["HTTP"], operator.client()
        operator.write(entry("m", 2.0, load_fifo=str(gate)), model_control="explicit")
        loading = InBackground(ask, address, "reload", model="m")
        gate.write_bytes(b"")
        assert loading.result().code == ""
        scaling = InBackground(ask, address, "scale", counts={"m": 3})
        wait_until(lambda: len(operator.server.workers) == 3, "they load")
        operator.write(entry("m", 3.0), model_control="explicit")
        assert ask(address, "reload", model="m").code == ""
        assert TAKEN_BACK in scaling.result().text
        assert client.infer("m").tag == 3.0
