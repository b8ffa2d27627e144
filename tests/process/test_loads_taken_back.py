"""Loads that hang: what is asked for after them takes them back, and the model goes on as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ask
from config_operator import fifo, operated
from operated import InBackground
from processes import wait_until
from repositories import clients_are_closed, entry
from tritonclient.utils import InferenceServerException

__all__ = ["clients_are_closed"]  # it is for every test here

TAKEN_BACK = "model 'm': the load was taken back, for what was asked for after it"


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
