"""What an import path or a pickle leads to, and the sentence when it leads nowhere."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from gpuserve.decorators import batch
from gpuserve_worker.inference.callable_loading import CallableKind, LoadError, build, kind_of, locate

MODELS = Path(__file__).parent.parent / "models"


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """Modules and import paths are as before: a worker loads once, this process often."""
    modules, paths = dict(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.path[:] = paths
    importlib.invalidate_caches()


def load(path: str, base_dir: Path = MODELS, device: str = "cuda:1", **kwargs: Any) -> Any:
    source = {"path": path, "base_dir": str(base_dir), "kwargs": kwargs}
    return build(locate(source), source, device)


def pickled(value: Any, **kwargs: Any) -> Any:
    source = {"pickle": cloudpickle.dumps(value), "kwargs": kwargs}
    return build(locate(source), source, "cpu")


def answer(inference_callable: Any) -> tuple[float, str]:
    (response,) = inference_callable([{}])
    return float(response["y"][0, 0]), str(response["device"][0, 0])


@pytest.mark.parametrize(
    ("path", "kwargs", "expected"),
    [
        (
            "loads.py:Scale",
            {"factor": 2.0},
            (2.0, "cuda:1"),
        ),  # a class is made with its kwargs and the device
        ("loads.py:Scale", {"factor": 2.0, "device": "cpu"}, (2.0, "cpu")),
        ("loads.py:make", {"factor": 3.0}, (3.0, "cuda:1")),  # a factory is called
        ("loads.py:make", {}, (1.0, "cuda:1")),
        ("loads.py:scale", {}, (4.0, "none")),  # an object and its method are taken as they are
        ("loads.py:scale.method", {}, (4.0, "none")),
        ("loads:make", {"factor": 3.0}, (3.0, "cuda:1")),  # a module by name beside the config
    ],
)
def test_what_a_path_leads_to(path: str, kwargs: dict[str, Any], expected: tuple[float, str]) -> None:
    assert answer(load(path, **kwargs)) == expected


@pytest.mark.parametrize("path", ["loads.py:plain", "loads.py:takes_device_input", "echo.py:raw"])
def test_a_function_over_requests_is_no_factory(path: str) -> None:
    found = load(path)
    file, attribute = path.split(":")
    assert found is getattr(sys.modules[file.removesuffix(".py")], attribute)


def test_a_file_in_a_folder_finds_its_neighbours(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "the_neighbour.py").write_text("def call(requests): return 5")
    (folder / "my-model.py").write_text("from the_neighbour import call")
    assert load("folder/my-model.py:call", tmp_path)([]) == 5


def test_a_module_is_registered_so_that_its_classes_pickle() -> None:
    scale = load("loads.py:Scale", factor=2.0)
    assert sys.modules["loads"].Scale is type(scale)


def test_pickles() -> None:
    offset = 3
    assert pickled(lambda requests: requests + offset)(4) == 7
    assert pickled(functools.partial(int, base=2))("11") == 3

    class Local:
        def __call__(self, requests: Any) -> Any:
            return requests

    assert pickled(Local())(5) == 5
    assert pickled(Local)(5) == 5


def test_a_decorated_callable_survives_pickling_as_one_that_takes_batches() -> None:
    from gpuserve_worker.inference.inference_request import accepts_batch

    @batch
    def call(x: Any) -> Any:
        return [x]

    assert accepts_batch(pickled(call))


def test_a_pickle_finds_the_modules_of_its_program_and_ours_come_first(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_main.py").write_text("def call(requests):\n    return requests\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    module_pickle = b"cneighbour_of_main\ncall\n."
    before = list(sys.path)
    target = locate({"pickle": module_pickle, "sys_path": [str(MODELS), *before, str(tmp_path)]})
    assert target([5]) == [5]
    added = [path for path in (str(MODELS), str(tmp_path)) if path not in before]
    assert sys.path == before + added


def test_a_pickle_is_not_kept_and_an_object_is_taken_as_it_is() -> None:
    source = {"pickle": cloudpickle.dumps(len)}
    assert locate(source) is len
    assert source == {}
    target = functools.partial(len)
    assert build(locate({"object": target}), {"object": target}, "cpu") is target


def test_a_function_that_needs_more_than_a_device_is_no_factory() -> None:
    def call(some: Any, device: str = "cuda") -> Any:
        return some, device

    def make(*, device: str) -> Any:
        return lambda some: (some, device)

    assert pickled(call)(1) == (1, "cuda")
    assert pickled(make)(1) == (1, "cpu")


FAILURES = {
    "no attribute given": ("loads.py", "'loads.py' is no import path: expected file.py:attribute or"),
    "no file": ("absent.py:x", "absent.py was not found: there is no file"),
    "no module": ("absent_module:x", "module 'absent_module' was not found: there is no module"),
    "no submodule": ("json.absent:x", "was not found: there is no module 'json.absent'"),
    "a missing dependency": ("broken_import.py:x", "raised ModuleNotFoundError: No module named 'a_package"),
    "the same by name": ("broken_import:x", "importing broken_import raised ModuleNotFoundError"),
    "a wrong name": ("loads.py:Scael", "has no attribute 'Scael'; did you mean 'Scale' or 'scale'?"),
    "a wrong method": ("loads.py:scale.metod", "has no attribute 'scale.metod'; did you mean 'method'?"),
    "a number": ("loads.py:number", "number is an object of type int, which cannot be called"),
    "an instance": ("loads.py:Nothing", "returned an object of type Nothing, which cannot be"),
    "a factory of numbers": ("loads.py:make_number", "returned an object of type int, which cannot be"),
    "a failing factory": ("loads.py:make_failing", "make_failing raised RuntimeError: no weights for"),
    "a factory that exits": ("loads.py:make_exit", "loads.py:make_exit raised SystemExit: 5"),
    "too few arguments": ("loads.py:Scale", "'loads.py:Scale' cannot be made with these kwargs: missing"),
    "generator": ("loads.py:generator", "is a generator, which gives any number of responses to a request"),
}


@pytest.mark.parametrize(("path", "text"), FAILURES.values(), ids=FAILURES)
def test_what_cannot_be_loaded_is_told_in_one_line(path: str, text: str) -> None:
    with pytest.raises(LoadError) as caught:
        load(path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_traceback_is_the_users_and_only_where_user_code_ran() -> None:
    with pytest.raises(LoadError) as caught:
        load("loads.py:make_failing")
    assert 'loads.py", line' in caught.value.traceback
    assert "gpuserve_worker" not in caught.value.traceback
    with pytest.raises(LoadError) as caught:
        load("loads.py:number")
    assert caught.value.traceback == ""


@pytest.mark.parametrize("path", ["echo.py:batched", "loads.py:scale", "loads.py:plain"])
def test_kwargs_for_what_is_called_as_it_is(path: str) -> None:
    with pytest.raises(LoadError, match="takes no kwargs, but 'a', 'b' were given"):
        load(path, a=1, b=2)


def test_a_generator_is_no_factory() -> None:
    def generated(device: str) -> Any:
        yield device

    with pytest.raises(LoadError, match="is a generator, which cannot be a factory"):
        pickled(generated)


def test_a_file_may_not_take_the_name_of_a_module_in_use(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("")
    with pytest.raises(LoadError, match=r"json\.py has the name of a module that is already in use, 'json'"):
        load("json.py:x", tmp_path)
    assert hasattr(sys.modules["json"], "dumps")


def test_a_file_that_fails_leaves_no_module(tmp_path: Path) -> None:
    (tmp_path / "half_done.py").write_text("x = 1\n1 / 0\n")
    with pytest.raises(LoadError, match=r"importing half_done\.py raised ZeroDivisionError"):
        load("half_done.py:x", tmp_path)
    assert "half_done" not in sys.modules


def test_a_spoiled_pickle() -> None:
    with pytest.raises(LoadError, match="unpickling the inference callable raised"):
        locate({"pickle": b"\x80\x04nonsense"})


async def stream() -> Any:
    yield 1


class AsyncCall:
    async def __call__(self, requests: Any) -> Any:
        return requests


@pytest.mark.parametrize(
    ("inference_callable", "kind"),
    [
        (len, CallableKind.PLAIN),
        (AsyncCall(), CallableKind.COROUTINE),
        (AsyncCall().__call__, CallableKind.COROUTINE),
        (stream, CallableKind.ASYNC_GENERATOR),
        (batch(stream), CallableKind.ASYNC_GENERATOR),
        (functools.partial(stream), CallableKind.ASYNC_GENERATOR),
        (functools.partial(AsyncCall()), CallableKind.COROUTINE),
    ],
)
def test_kinds(inference_callable: Any, kind: CallableKind) -> None:
    assert kind_of(inference_callable) is kind
