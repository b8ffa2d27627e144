"""``DecoupledModelClient`` and ``AsyncioDecoupledModelClient`` against a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from client_server import client_server, decoupled_models, gate_of
from processes import wait_until

from gpuserve.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    ClientClosedError,
    ClientInferenceServerError,
    ClientModelDoesntSupportBatchingError,
    ClientModelUnavailableError,
    ClientTimeoutError,
    ClientValueError,
    DecoupledModelClient,
    ModelClient,
)
from gpuserve.compat.pytriton import client as pytriton_client

FLOAT = np.ones(1, np.float32)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("client")
    gate_of(folder)
    with client_server(folder, decoupled_models()) as running:
        yield running.url("grpc")


def wanted(count: int) -> Any:
    return np.array([count], np.int32)


def values(responses: Any) -> list[int]:
    return [int(one["y"].flat[0]) for one in responses]


async def listed(responses: Any) -> list[Any]:
    return [one async for one in responses]


def ask_aio(url: str, model: str, *inputs: Any, batch: bool = False, **how: Any) -> list[Any]:
    """All responses of one inference of the asyncio client."""

    async def main() -> list[Any]:
        options = {key: how.pop(key) for key in ("inference_timeout_s", "init_timeout_s") if key in how}
        async with AsyncioDecoupledModelClient(url, model, **options) as client:
            return await listed((client.infer_batch if batch else client.infer_sample)(*inputs, **how))

    return asyncio.run(main())


def ask(url: str, model: str, *inputs: Any, batch: bool = False, **how: Any) -> list[Any]:
    """The same of the blocking one."""
    options = {key: how.pop(key) for key in ("inference_timeout_s", "init_timeout_s") if key in how}
    with DecoupledModelClient(url, model, **options) as client:
        return list((client.infer_batch if batch else client.infer_sample)(*inputs, **how))


BOTH = pytest.mark.parametrize("asked", [ask, ask_aio])

# ---- both clients -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("count", [0, 1, 5])
def test_as_many_responses_as_there_are(url: str, asked: Any, count: int) -> None:
    responses = asked(url, "count", wanted(count))
    assert values(responses) == list(range(count))
    assert all(one["y"].shape == (1,) for one in responses)
    assert all(one["y"].shape == (1, 1) for one in asked(url, "count", x=wanted(count)[None], batch=True))


@BOTH
def test_a_model_that_returns_instead(url: str, asked: Any) -> None:
    assert values(asked(url, "plain", wanted(1))) == [7]


@BOTH
def test_parameters_and_headers_are_sent(url: str, asked: Any) -> None:
    how = {"parameters": {"a": 1.5, "b": "two", "priority": 1}, "headers": {"X-Some": "h"}}
    responses = asked(url, "tells", FLOAT, **how)
    assert [one["seen"].tolist() for one in responses] == [[b"[('a', 1.5), ('b', 'two')]"]] * 2


@BOTH
def test_a_response_that_does_not_come(url: str, asked: Any) -> None:
    with pytest.raises(ClientTimeoutError, match="waiting for the next response of waits_for_ever/<latest>"):
        asked(url, "waits_for_ever", wanted(1), inference_timeout_s=0.5)


@BOTH
def test_what_goes_wrong(url: str, asked: Any) -> None:
    with pytest.raises(ClientInferenceServerError, match="Use ModelClient instead"):
        asked(url, "coupled", wanted(1))
    with pytest.raises(ClientInferenceServerError, match="FP64"):
        asked(url, "count", np.ones(1))
    with pytest.raises(ClientValueError, match="not a numpy array"):
        asked(url, "count", [1])
    with pytest.raises(ClientValueError, match="parameters"):
        asked(url, "count", wanted(1), parameters={"a": [1.5]})
    with pytest.raises(ClientModelUnavailableError):
        asked(url, "nope", wanted(1), init_timeout_s=0.2)


@pytest.mark.parametrize("kind", [DecoupledModelClient, AsyncioDecoupledModelClient])
def test_only_over_grpc(kind: Any) -> None:
    with pytest.raises(ClientValueError, match=f"{kind.__name__} is only supported for grpc protocol"):
        kind("http://localhost:8000", "m")


def test_the_others_refuse_a_decoupled_model(url: str) -> None:
    async def main() -> None:
        async with AsyncioModelClient(url, "count") as client:
            await client.infer_sample(wanted(1))

    with ModelClient(url, "count") as client:
        assert client.model_config.decoupled
        with pytest.raises(ClientInferenceServerError, match="Use DecoupledModelClient instead"):
            client.infer_sample(wanted(1))
    with pytest.raises(ClientInferenceServerError, match="decoupled"):
        asyncio.run(main())


# ---- the blocking one ---------------------------------------------------------------------------


def test_one_inference_after_the_other_over_one_stream(url: str) -> None:
    with DecoupledModelClient(url, "count") as client:
        for count in (3, 0, 1, 4):
            assert values(client.infer_sample(wanted(count))) == list(range(count))
        stream = client._results
        assert values(client.infer_sample(wanted(2), headers={"a": "b"})) == [0, 1]
        assert client._results is not stream


def test_an_error_after_some_responses_and_then_another_inference(url: str) -> None:
    with DecoupledModelClient(url, "fails_half_way") as client:
        for _ in range(2):
            responses = client.infer_sample(wanted(1))
            assert values([next(responses) for _ in range(3)]) == [0, 1, 2]
            with pytest.raises(ClientInferenceServerError):
                next(responses)


def test_one_inference_at_a_time(url: str) -> None:
    with DecoupledModelClient(url, "count") as client:
        first = client.infer_sample(wanted(2))
        with pytest.raises(ClientInferenceServerError, match="Inference is already in progress"):
            client.infer_sample(wanted(2))
        assert values(first) == [0, 1]
        with pytest.raises(ClientValueError):
            client.infer_sample([1])
        assert values(client.infer_sample(wanted(2))) == [0, 1]


def test_a_generator_that_is_given_up_makes_room(url: str) -> None:
    before = threading.active_count()
    with DecoupledModelClient(url, "endless") as client:
        for _ in range(3):
            for number, one in enumerate(client.infer_sample(wanted(1))):
                assert values([one]) == [number]
                if number == 5:
                    break
        responses = client.infer_sample(wanted(1))
        responses.close()
        assert values([next(client.infer_sample(wanted(1)))]) == [0]
    wait_until(lambda: threading.active_count() <= before, "the threads of the streams are gone")


def test_closing_the_client_ends_the_inference(url: str) -> None:
    client = DecoupledModelClient(url, "waits_for_ever")
    responses = client.infer_sample(wanted(1))
    assert values([next(responses)]) == [0]
    closing = threading.Timer(0.2, client.close)
    closing.start()
    with pytest.raises(ClientClosedError, match="DecoupledModelClient is closed"):
        next(responses)
    closing.join()
    with pytest.raises(ClientClosedError):
        client.infer_sample(wanted(1))


def test_from_existing_clients(url: str) -> None:
    with DecoupledModelClient(url, "count", access_token="t") as client:
        config = client.model_config
        with DecoupledModelClient.from_existing_client(client) as again:
            assert again.model_config is config
            assert again.settings == client.settings
            assert values(again.infer_sample(wanted(2))) == [0, 1]

        async def main() -> list[Any]:
            async with AsyncioDecoupledModelClient.from_existing_client(client) as third:
                assert await third.model_config is config
                return await listed(third.infer_sample(wanted(2)))

        assert values(asyncio.run(main())) == [0, 1]


def test_a_batch_needs_a_model_that_batches(url: str) -> None:
    with DecoupledModelClient(url, "count") as client:
        config = client.model_config
    unbatched = type(config)(**{**vars(config), "max_batch_size": 0, "batching": False})
    with (
        DecoupledModelClient(url, "count", model_config=unbatched) as client,
        pytest.raises(ClientModelDoesntSupportBatchingError),
    ):
        client.infer_batch(wanted(1))


# ---- the asyncio one ----------------------------------------------------------------------------


def test_many_streams_at_once(url: str) -> None:
    async def main() -> list[list[Any]]:
        async with AsyncioDecoupledModelClient(url, "each_to_its_own", lazy_init=False) as client:
            return await asyncio.gather(*(listed(client.infer_sample(wanted(n))) for n in range(20)))

    assert [values(one) for one in asyncio.run(main())] == [list(range(n)) for n in range(20)]


def test_a_generator_that_is_closed_takes_the_request_back(url: str) -> None:
    async def main() -> list[Any]:
        async with AsyncioDecoupledModelClient(url, "endless") as client:
            for _ in range(3):
                responses = client.infer_sample(wanted(1))
                first = [await anext(responses) for _ in range(4)]
                await responses.aclose()
            return first

    assert values(asyncio.run(main())) == [0, 1, 2, 3]


async def test_an_error_after_some_responses(url: str) -> None:
    async with AsyncioDecoupledModelClient(url, "fails_half_way") as client:
        responses = client.infer_sample(wanted(1))
        assert values([await anext(responses) for _ in range(3)]) == [0, 1, 2]
        with pytest.raises(ClientInferenceServerError):
            await anext(responses)


def test_clients_of_pytriton_wait_for_ever(url: str) -> None:
    ended: list[BaseException] = []

    def wait(client: pytriton_client.DecoupledModelClient) -> None:
        try:
            list(client.infer_sample(wanted(1)))
        except BaseException as error:
            ended.append(error)

    with pytriton_client.DecoupledModelClient(url, "waits_for_ever", inference_timeout_s=0.1) as patient:
        thread = threading.Thread(target=wait, args=(patient,))
        thread.start()
        with (
            DecoupledModelClient(url, "waits_for_ever", inference_timeout_s=0.3) as client,
            pytest.raises(ClientTimeoutError),
        ):
            list(client.infer_sample(wanted(1)))
        assert not ended
        patient.close()
        thread.join()
    assert [type(error) for error in ended] == [ClientClosedError]


async def test_asyncio_clients_of_pytriton_wait_for_ever(url: str) -> None:
    patient = pytriton_client.AsyncioDecoupledModelClient(url, "waits_for_ever", inference_timeout_s=0.1)
    async with patient:
        waiting = asyncio.ensure_future(listed(patient.infer_sample(wanted(1))))
        late = AsyncioDecoupledModelClient(url, "waits_for_ever", inference_timeout_s=0.3)
        async with late:
            with pytest.raises(ClientTimeoutError):
                await listed(late.infer_sample(wanted(1)))
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
