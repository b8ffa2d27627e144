"""``ModelClient`` against real servers, over both protocols."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bound import FLOATS_IN_AND_OUT, InBackground, free_server
from client_server import PROTOCOLS, TIMEOUT_S, ClientServer, client_server, free_port, gate_of, unary_models

from gpuserve.client import (
    ClientClosedError,
    ClientInferenceServerError,
    ClientModelDoesntSupportBatchingError,
    ClientModelUnavailableError,
    ClientTimeoutError,
    ClientValueError,
    ModelClient,
)
from gpuserve.client.client_config import DeviceKind, TensorSpec
from gpuserve.decorators import batch


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("client")
    with client_server(folder, unary_models(gate_of(folder))) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(server: ClientServer, protocol: str) -> str:
    return server.url(protocol)


ROW = np.array([1, 2, 3], np.float32)
ROWS = np.array([[1, 2], [3, 4]], np.float32)

# ---- inference ----------------------------------------------------------------------------------


def test_a_sample_and_a_batch_by_position_and_by_name(url: str) -> None:
    with ModelClient(url, "echo") as client:
        for sample in (client.infer_sample(ROW), client.infer_sample(x=ROW)):
            assert list(sample) == ["y"]
            np.testing.assert_array_equal(sample["y"], ROW)
        for rows in (client.infer_batch(ROWS), client.infer_batch(x=ROWS)):
            np.testing.assert_array_equal(rows["y"], ROWS)
            assert rows["y"].dtype == np.float32


def test_a_model_that_does_not_batch(url: str) -> None:
    with ModelClient(url, "flat") as client:
        assert not client.is_batching_supported
        np.testing.assert_array_equal(client.infer_sample(ROW)["y"], ROW)
        with pytest.raises(ClientModelDoesntSupportBatchingError, match="flat doesn't support batching"):
            client.infer_batch(ROWS)


def test_arrays_that_are_no_plain_memory(url: str) -> None:
    strided, read_only = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2], ROWS.copy()
    read_only.flags.writeable = False
    with ModelClient(url, "echo") as client:
        for rows in (strided, strided.T, read_only, np.empty((2, 0), np.float32)):
            np.testing.assert_array_equal(client.infer_batch(rows)["y"], rows)


@pytest.mark.parametrize(
    "rows",
    [
        np.array([[b"a", b""], [b"\xff\x00", b"long" * 1000]], dtype=object),
        np.array([[b"ab", b"c"]], dtype="S2"),
        np.empty((3, 0), dtype=object),
        np.empty((1, 0), dtype="S4"),
    ],
)
def test_byte_strings_and_none_of_them(url: str, rows: Any) -> None:
    with ModelClient(url, "text") as client:
        answer = client.infer_batch(rows)["y"]
    assert answer.shape == rows.shape
    assert answer.tolist() == rows.astype(object).tolist()


def test_optional_inputs_may_be_left_out(url: str) -> None:
    one = np.array([[1.0]], np.float32)
    with ModelClient(url, "optional") as client:
        assert client.infer_batch(one)["given"].tolist() == [[b"a"]]
        assert client.infer_batch(one, one)["sum"].tolist() == [[2.0]]
        assert client.infer_batch(b=one, a=one)["given"].tolist() == [[b"a,b"]]


def test_parameters_reach_the_model_and_the_reserved_ones_the_server(url: str) -> None:
    x = np.ones((1, 1), np.float32)
    given: dict[str, Any] = {"text": "t", "count": 7, "flag": True, "half": 0.5, "whole": 3.0}
    given |= {"priority": 1, "timeout": 20_000_000}
    with ModelClient(url, "parameters") as client:
        answer = client.infer_batch(x, parameters=given, headers={"X-Anything": 5})
        assert (
            answer["seen"][0, 0]
            == b"[('count', 7), ('flag', True), ('half', 0.5), ('text', 't'), ('whole', 3.0)]"
        )
        assert given["priority"] == 1


def test_the_time_a_request_may_take(server: ClientServer, url: str) -> None:
    with ModelClient(url, "gate") as client:
        with pytest.raises(ClientTimeoutError, match="Timeout occurred during inference request"):
            client.infer_sample(np.array([1], np.int32), parameters={"timeout": 100_000})
        server.open_gate()


# ---- what is known of the model -------------------------------------------------------------------


def test_the_configuration(url: str) -> None:
    with ModelClient(url, "optional") as client:
        config = client.model_config
        assert client.model_config is config
    assert (config.model_name, config.model_version, config.backend) == ("optional", 1, "python")
    assert (config.batching, config.max_batch_size, config.decoupled) == (True, 8, False)
    assert config.inputs == [TensorSpec("a", (1,), np.float32), TensorSpec("b", (1,), np.float32, True)]
    assert config.outputs == [TensorSpec("sum", (1,), np.float32), TensorSpec("given", (1,), np.bytes_)]
    assert config.batcher is not None
    assert config.batcher.preferred_batch_size == [8]
    assert config.instance_group == {DeviceKind.KIND_CPU: 1}
    assert config.response_cache is not None
    assert not config.response_cache.enable


def test_a_version(url: str) -> None:
    with ModelClient(url, "echo", "3") as client:
        assert client.model_config.model_version == 3
        np.testing.assert_array_equal(client.infer_sample(ROW)["y"], ROW)
    with (
        ModelClient(url, "echo", "2", init_timeout_s=0.4) as client,
        pytest.raises(ClientModelUnavailableError, match="echo/2"),
    ):
        client.infer_sample(ROW)


def test_a_configuration_that_is_given_is_not_asked_for(url: str, protocol: str) -> None:
    with ModelClient(url, "echo") as client:
        config = client.model_config
    nowhere = f"{protocol}://127.0.0.1:{free_port()}"
    with ModelClient(nowhere, "echo", model_config=config, ensure_model_is_ready=False) as client:
        assert client.model_config is config
        assert client.is_batching_supported
    with ModelClient(url, "echo", model_config=config, ensure_model_is_ready=False) as client:
        np.testing.assert_array_equal(client.infer_sample(ROW)["y"], ROW)


def test_from_an_existing_client(url: str) -> None:
    with ModelClient(url, "echo", "3", init_timeout_s=7, inference_timeout_s=8, access_token="t") as client:
        early = ModelClient.from_existing_client(client)
        config = client.model_config
        late = ModelClient.from_existing_client(client)
    with early, late:
        assert early.settings == late.settings == client.settings
        assert late.model_config is config
        assert early.model_config == config
        for one in (early, late):
            np.testing.assert_array_equal(one.infer_sample(ROW)["y"], ROW)


def test_initialisation_that_is_not_lazy(url: str) -> None:
    with ModelClient(url, "echo", lazy_init=False, init_timeout_s=TIMEOUT_S) as client:
        assert client.known_config is not None
    with pytest.raises(ClientModelUnavailableError):
        ModelClient(url, "nope", lazy_init=False, init_timeout_s=0.4)


def test_the_library_and_a_client_of_it(url: str, protocol: str) -> None:
    with ModelClient(url, "echo") as client:
        assert client.get_lib().__name__ == f"tritonclient.{protocol}"
        with client.create_client_from_url(url, network_timeout_s=5) as made:
            assert made.is_server_live()


# ---- waiting --------------------------------------------------------------------------------------


def test_waiting_for_what_is_there(url: str) -> None:
    with ModelClient(url, "echo") as client:
        client.wait_for_server(TIMEOUT_S)
        client.wait_for_model(TIMEOUT_S)
        assert client.known_config is None


def test_a_model_that_does_not_come(url: str) -> None:
    with ModelClient(url, "nope", init_timeout_s=0.4) as client:
        begin = time.monotonic()
        with pytest.raises(ClientModelUnavailableError, match="nope/<latest> is unavailable") as raised:
            client.infer_sample(ROW)
        assert 0.3 <= time.monotonic() - begin < TIMEOUT_S / 2
    assert isinstance(raised.value, ClientTimeoutError)
    assert raised.value.message == str(raised.value)


def test_a_server_that_does_not_come(protocol: str) -> None:
    with ModelClient(f"{protocol}://127.0.0.1:{free_port()}", "echo", init_timeout_s=0.3) as client:
        for wait in (lambda: client.wait_for_server(0.2), client.infer_sample, lambda: client.model_config):
            with pytest.raises(ClientTimeoutError, match="Waiting for server to be ready timed") as raised:
                wait()
            assert not isinstance(raised.value, ClientModelUnavailableError)


def test_a_server_that_accepts_and_says_nothing(protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"{protocol}://127.0.0.1:{listener.getsockname()[1]}"
        begin = time.monotonic()
        with ModelClient(address, "echo", init_timeout_s=0.5) as client, pytest.raises(ClientTimeoutError):
            client.infer_sample(ROW)
        assert time.monotonic() - begin < TIMEOUT_S / 2


def test_a_server_and_a_model_that_come_later(protocol: str) -> None:
    @batch
    def plus_one(INPUT_1: Any) -> Any:
        return [INPUT_1 + 1]

    port = free_port()

    def ask() -> Any:
        with ModelClient(f"{protocol}://127.0.0.1:{port}", "late", init_timeout_s=TIMEOUT_S) as client:
            return client.infer_sample(ROW)

    answer = InBackground(ask)
    with free_server(**{f"{protocol}_port": port}) as server:
        server.run()
        server.bind("late", plus_one, **FLOATS_IN_AND_OUT)
        assert answer.result()["OUTPUT_1"].tolist() == [2, 3, 4]


# ---- what goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "named", "text"),
    [
        ((), {}, "Provide input data"),
        ((ROW,), {"x": ROW}, "either by position or by name"),
        ((ROW, ROW), {}, "has 1 inputs, 2 were given"),
        (([1.0, 2.0],), {}, "Input x is not a numpy array. Got <class 'list'> instead"),
        ((ROW.astype(complex),), {}, "dtype complex"),
        ((np.array(["a"]),), {}, "Unicode inputs are not supported"),
        ((np.array(["a"], dtype=object),), {}, "encoded strings"),
    ],
)
def test_wrong_inputs(url: str, inputs: Any, named: Any, text: str) -> None:
    with ModelClient(url, "echo") as client:
        with pytest.raises(ClientValueError, match=text):
            client.infer_sample(*inputs, **named)
        np.testing.assert_array_equal(client.infer_sample(ROW)["y"], ROW)


def test_text_that_is_not_encoded_is_a_runtime_error_too(url: str) -> None:
    with ModelClient(url, "text") as client:
        for array in (np.array(["ä"]), np.array([b"a", "b"], dtype=object)):
            with pytest.raises(RuntimeError, match=r"(?i)encode"):
                client.infer_sample(array)


@pytest.mark.parametrize("what", ["parameters", "headers"])
@pytest.mark.parametrize("given", [[("a", 1)], {1: "a"}, {"a": [1.5]}, {"a": None}])
def test_wrong_parameters_and_headers(url: str, what: str, given: Any) -> None:
    with ModelClient(url, "echo") as client, pytest.raises(ClientValueError, match=what):
        client.infer_sample(ROW, **{what: given})


def test_what_the_server_refuses(url: str) -> None:
    with ModelClient(url, "echo") as client:
        for call, text in [
            (lambda: client.infer_sample(nope=ROW), "nope"),
            (lambda: client.infer_sample(ROW.astype(np.float64)), "FP64"),
            (lambda: client.infer_batch(np.ones((65, 1), np.float32)), "64"),
        ]:
            with pytest.raises(ClientInferenceServerError, match=text) as raised:
                call()
            assert raised.value.message.startswith("Error occurred during inference request. Message: ")


def test_a_model_that_fails(url: str) -> None:
    with ModelClient(url, "raises") as client, pytest.raises(ClientInferenceServerError):
        client.infer_sample(ROW)


def test_a_model_that_takes_too_long(server: ClientServer, url: str) -> None:
    x = np.array([1], np.int32)
    with ModelClient(url, "gate", inference_timeout_s=0.4) as client:
        client.wait_for_model(TIMEOUT_S)
        with pytest.raises(ClientTimeoutError, match=r"Timeout occurred during inference.*Timeout: 0.4 s"):
            client.infer_sample(x)
        server.open_gate()


def test_a_server_that_went_away(protocol: str) -> None:
    with free_server() as server:
        server.bind("m", lambda requests: requests, **FLOATS_IN_AND_OUT)
        server.run()
        address = server.addresses[protocol].removeprefix("http://")
        with ModelClient(f"{protocol}://{address}", "m") as client:
            client.wait_for_model(TIMEOUT_S)
            assert client.is_batching_supported
            server.stop()
            with pytest.raises((ClientTimeoutError, ClientInferenceServerError)):
                client.infer_sample(ROW)


def test_a_client_that_is_closed(url: str) -> None:
    client = ModelClient(url, "echo")
    client.infer_sample(ROW)
    client.close()
    client.close()
    for call in (
        lambda: client.infer_sample(ROW),
        lambda: client.infer_batch(ROWS),
        lambda: client.wait_for_model(1),
        lambda: client.wait_for_server(1),
        client.load_model,
        client.unload_model,
    ):
        with pytest.raises(ClientClosedError, match="ModelClient is closed"):
            call()


def test_loading_is_refused_by_a_server_that_does_not_do_it(url: str) -> None:
    with ModelClient(url, "echo") as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(ClientInferenceServerError):
                call()
