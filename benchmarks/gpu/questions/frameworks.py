"""What libraries of networks do with the arrays of a worker: conversions, CUDA graphs, ONNX Runtime and
``torch.compile``. Each question is asked with a device, "cuda" or, beside the stand-in, "cpu".
"""

from __future__ import annotations

import base64
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from benchmarks.gpu.questions.asking import MIB, Answer, median_us, runtime_of_device, seconds_of


def _first_and_next(call: Callable[[], object], wait: Callable[[], object]) -> Answer:
    """Seconds of the first call, which may compile, and microseconds of one of the next."""

    def waited() -> None:
        call()
        wait()

    return {"first_s": round(seconds_of(waited), 3), "next_us": median_us(waited, 50)}


def strided(device: str) -> Answer:
    """What a strided or cast output costs, by cupy, which compiles a kernel in each process, and by torch."""
    runtime, cupy = runtime_of_device(), importlib.import_module("cupy")
    array = cupy.arange(MIB, dtype=cupy.float32).reshape(1024, 1024)
    found: Answer = {
        "cupy, contiguous": _first_and_next(
            lambda: cupy.ascontiguousarray(array.T), runtime.deviceSynchronize
        ),
        "cupy, to float16": _first_and_next(lambda: array.astype(np.float16), runtime.deviceSynchronize),
    }
    torch = importlib.import_module("torch")
    tensor = torch.arange(MIB, dtype=torch.float32, device=device).reshape(1024, 1024)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found["torch, contiguous"] = _first_and_next(tensor.T.contiguous, wait)
    found["torch, to float16"] = _first_and_next(lambda: tensor.to(torch.float16), wait)
    from gpuserve_worker.cuda.device.arrays import converted_tensor

    turned = converted_tensor(torch, tensor.T, np.dtype(np.float16))
    wanted = np.arange(MIB, dtype=np.float32).reshape(1024, 1024).T.astype(np.float16)
    return {**found, "the worker's is right": bool((turned.cpu().numpy() == wanted).all())}


def graphs(device: str) -> Answer:
    """Microseconds of 50 small kernels one by one and as a replayed CUDA graph, by cupy and by torch; whether
    a replay reads what is in its static input then, also one that another thread replays.
    """
    found: Answer = {"cupy": _graph_of_cupy()}
    if device == "cuda":
        found["torch"] = _graph_of_torch(importlib.import_module("torch"))
    return found


_KERNELS: Final = 50


def _graph_of_cupy() -> Answer:
    runtime, cupy = runtime_of_device(), importlib.import_module("cupy")
    x, y = cupy.zeros(1024, cupy.float32), cupy.zeros(1024, cupy.float32)

    def work() -> None:
        cupy.multiply(x, 1, out=y)
        for _ in range(_KERNELS - 1):
            cupy.add(y, 1, out=y)

    work()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        work()
        graph = stream.end_capture()
    runtime.deviceSynchronize()
    return _replayed(work, graph.launch, runtime.deviceSynchronize, x.fill, lambda: float(y[0]))


def _graph_of_torch(torch: Any) -> Answer:
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")

    def work() -> None:
        y.copy_(x)
        for _ in range(_KERNELS - 1):
            y.add_(1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return _replayed(work, graph.replay, torch.cuda.synchronize, x.fill_, lambda: float(y[0]))


def _replayed(
    work: Callable[[], object],
    replay: Callable[[], object],
    wait: Callable[[], object],
    put: Callable[[float], object],
    first: Callable[[], float],
) -> Answer:
    def is_right(value: float, call: Callable[[], object]) -> bool:
        put(value)
        wait()
        call()
        wait()
        return first() == value + _KERNELS - 1

    def elsewhere() -> None:
        with ThreadPoolExecutor(1, initializer=runtime_of_device) as pool:
            pool.submit(replay).result()

    return {
        "one by one": _first_and_next(work, wait),
        "replayed": _first_and_next(replay, wait),
        "reads its input": is_right(3.0, replay),
        "in another thread": is_right(5.0, elsewhere),
    }


#: ``y = MatMul(x, w)`` of FP32, opset 13, without weights.
_ONNX: Final = (
    "CAg6VwoRCgF4CgF3EgF5IgZNYXRNdWwSAWdaFAoBeBIPCg0IARIJCgMSAW4KAghAWhMKAXcSDgoMCAESCAoCCEAKAghAYhQK"
    "AXkSDwoNCAESCQoDEgFuCgIIQEIECgAQDQ=="
)


def onnx(device: str) -> Answer:
    """Whether ONNX Runtime computes on the device by pip's wheels, on a stream and with memory of ours."""
    runtime = importlib.import_module("onnxruntime")
    found: Answer = {"version": runtime.__version__, "providers": runtime.get_available_providers()}
    provider = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
    if provider not in found["providers"]:
        return found
    cuda = runtime_of_device()
    stream = int(cuda.streamCreateWithFlags(1))
    options: dict[str, str] = {}
    if device == "cuda":
        found["preload_dlls_s"] = round(seconds_of(runtime.preload_dlls), 3)
        options["user_compute_stream"] = str(stream)
    made: list[Any] = []

    def make() -> None:
        providers = [(provider, options)]
        made.append(runtime.InferenceSession(base64.b64decode(_ONNX), providers=providers))

    found["session_s"] = round(seconds_of(make), 3)
    (session,) = made
    found["uses"] = session.get_providers()
    x, w = (np.random.default_rng(one).standard_normal((64, 64), np.float32) for one in (1, 2))
    binding = session.io_binding()
    for name, value in (("x", x), ("w", w)):
        binding.bind_ortvalue_input(name, runtime.OrtValue.ortvalue_from_numpy(value, device, 0))
    binding.bind_output("y", device, 0)
    run = runtime.RunOptions()
    if device == "cuda":
        run.add_run_config_entry("disable_synchronize_execution_providers", "1")
    found["run"] = _first_and_next(
        lambda: session.run_with_iobinding(binding, run), lambda: cuda.streamSynchronize(stream)
    )
    (y,) = binding.copy_outputs_to_cpu()
    # TF32 has ten bits.
    return {**found, "is right": bool(np.allclose(y, x @ w, rtol=1e-2, atol=5e-2))}


def compiled(device: str, backend: str) -> Answer:
    """Seconds of ``torch.compile`` of a small network, microseconds of a call before and after, and whether
    its results are the same, in the thread that compiled it and in another.
    """
    torch = importlib.import_module("torch")
    network = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 16), torch.nn.Softmax(-1)
    )
    network, x = network.eval().to(device), torch.randn(8, 256, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found: Answer = {}
    with torch.inference_mode():
        wanted = network(x)
        found["plain"] = _first_and_next(lambda: network(x), wait)
        modes = (
            {"default": None, "reduce-overhead": "reduce-overhead"} if backend == "inductor" else {"": None}
        )
        for name, mode in modes.items():
            try:
                ours = torch.compile(network, backend=backend, mode=mode)
                found[f"{backend} {name}".strip()] = {
                    **_first_and_next(lambda ours=ours: ours(x), wait),
                    "is right": bool(torch.allclose(ours(x), wanted, atol=1e-4)),
                    "in another thread": _in_another_thread(torch, lambda ours=ours: ours(x), wanted),
                }
            except Exception as error:  # without a compiler, or Triton: that is the answer
                found[f"{backend} {name}".strip()] = f"{type(error).__name__}: {error}"[:300]
    return {**found, "triton": "triton" in sys.modules}


def _in_another_thread(torch: Any, call: Callable[[], Any], wanted: Any) -> Any:
    """As in a server that warms a model up in one thread and calls it in another."""

    def run() -> bool:
        with torch.inference_mode():
            return bool(torch.allclose(call(), wanted, atol=1e-4))

    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(run).result()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
