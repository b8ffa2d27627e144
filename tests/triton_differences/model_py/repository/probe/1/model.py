"""Does what a request names, a method beginning with ``probe_``, and tells what came of it as JSON."""

import argparse
import json
import multiprocessing
import os
import sys
import unittest

import numpy as np
import triton_python_backend_utils as pb_utils

TYPES = [
    "BOOL",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "FP16",
    "FP32",
    "FP64",
    "STRING",
]


def tried(call):
    try:
        return call()
    except Exception as error:
        return {"raised": type(error).__name__, "text": str(error)}


def raised(call):
    """The type of the exception, and its text unless pybind11 wrote it."""
    try:
        call()
    except TypeError:
        return "TypeError"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def told(tensor):
    array = tensor.as_numpy()
    values = [str(one) for one in array.ravel().tolist()]
    return [tensor.name(), array.dtype.name, list(tensor.shape()), tensor.is_cpu(), values]


def shown(response):
    if response.has_error():
        return {"code": int(response.error().code()), "text": response.error().message()}
    return [told(one) for one in response.output_tensors()]


def asked(model="inner", outputs=("y",), name="x", x=(1, 2), dtype=np.float32, **more):
    inputs = [pb_utils.Tensor(name, np.array(x, dtype))]
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(outputs), inputs=inputs, **more
    )


def ask_for_double(number):
    return tried(lambda: shown(asked(x=(number,)).exec()))


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.kept = []

    def execute(self, requests):
        return [self.answer(one) for one in requests]

    def answer(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "PROBE").as_numpy()[0].decode()
        said = json.dumps(tried(lambda: getattr(self, f"probe_{name}")(request)))
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([said], dtype=object))])

    # ---- initialize ---------------------------------------------------------------------------

    def probe_arguments(self, _):
        return {key: value for key, value in self.args.items() if key != "model_repository"} | {
            "model_config": sorted(json.loads(self.args["model_config"])["parameters"])
        }

    def probe_model_dir(self, _):
        return pb_utils.get_model_dir().split("/")[-2:]

    def probe_config_lookup(self, _):
        config = json.loads(self.args["model_config"])
        return [
            pb_utils.get_input_config_by_name(config, "X")["data_type"],
            pb_utils.get_output_config_by_name(config, "SAID")["dims"],
            pb_utils.get_input_config_by_name(config, "nope"),
            pb_utils.using_decoupled_model_transaction_policy(config),
        ]

    def probe_process(self, _):
        main = sys.modules["__main__"]
        return {
            "argv": sys.argv,
            "path[0]": sys.path[0],
            "main": [main.__name__, hasattr(main, "__file__")],
            "name": __name__,
            "file": __file__.split("/")[-3:],
            "package": __package__,
            "parsed": vars(argparse.ArgumentParser().parse_args()),
            "tested": unittest.main(exit=False).result.testsRun,
        }

    def probe_folders_on_the_path(self, _):
        folder = os.path.dirname(os.path.dirname(__file__))
        return [one.removeprefix(folder) for one in sys.path if one.startswith(folder)]

    def probe_c_module(self, _):
        import c_python_backend_utils as c

        names = [
            "InferenceRequest",
            "InferenceResponse",
            "Tensor",
            "TritonError",
            "Logger",
            "load_model",
        ]
        same = [getattr(c, one) is getattr(pb_utils, one) for one in names]
        return [same, c.COUNTER == c.MetricKind.COUNTER, c.ResponseIterator.__name__]

    def probe_memory_types(self, _):
        import c_python_backend_utils as c

        kinds = [pb_utils.TRITONSERVER_MEMORY_GPU, pb_utils.TRITONSERVER_MEMORY_CPU]
        told = [[one.name, one.value, str(one)] for one in kinds]
        wrong = tried(lambda: type(pb_utils.PreferredMemory(2)).__name__)["raised"]
        return [told, type(kinds[0]) is c.MemoryType, hasattr(pb_utils, "MemoryType"), wrong]

    # ---- types --------------------------------------------------------------------------------

    def probe_types_to_numpy(self, _):
        return {one: np.dtype(pb_utils.triton_string_to_numpy("TYPE_" + one)).name for one in TYPES}

    def probe_numbers_to_numpy(self, _):
        return {number: np.dtype(pb_utils.triton_to_numpy_type(number)).name for number in range(1, 14)}

    def probe_numpy_to_numbers(self, _):
        types = [np.bool_, np.int8, np.uint64, np.float16, np.float32, np.float64, np.bytes_, np.object_]
        return [pb_utils.numpy_to_triton_type(one) for one in types]

    def probe_bytes_there_and_back(self, _):
        array = np.array([[b"a", b""], [b"\x00", "é".encode()]], dtype=object)
        there = pb_utils.serialize_byte_tensor(array)
        back = pb_utils.deserialize_bytes_tensor(there.item() if there.dtype == object else there.tobytes())
        return [one.hex() for one in back.ravel().tolist()]

    # ---- tensors ------------------------------------------------------------------------------

    def probe_tensors(self, _):
        arrays = [np.array([[0, 1]], dtype=one) for one in ("bool", "int8", "uint64", "float16", "float64")]
        return [told(pb_utils.Tensor("t", one)) for one in arrays]

    def probe_tensor_datatype(self, _):
        return int(pb_utils.Tensor("t", np.zeros(1, np.int8)).triton_dtype())

    def probe_tensor_of_strings(self, _):
        arrays = [
            np.array([b"a", "b"], dtype=object),
            np.array(["é"], dtype=object),
            np.array([1], dtype=object),
        ]
        return [tried(lambda one=one: told(pb_utils.Tensor("t", one))) for one in arrays]

    def probe_tensor_that_is_not_contiguous(self, _):
        return told(pb_utils.Tensor("t", np.arange(6, dtype=np.int32).reshape(2, 3).T))

    def probe_tensor_of_no_array(self, _):
        return tried(lambda: told(pb_utils.Tensor("t", [1, 2])))["raised"]

    def probe_tensor_without_a_name(self, _):
        return tried(lambda: told(pb_utils.Tensor("", np.zeros(1))))

    def probe_dlpack_there_and_back(self, _):
        there = pb_utils.Tensor("t", np.arange(3, dtype=np.float32))
        return told(pb_utils.Tensor.from_dlpack("back", there.to_dlpack()))

    def probe_dlpack_of_numpy(self, _):
        return told(pb_utils.Tensor.from_dlpack("t", np.arange(3, dtype=np.int64)))

    def probe_dlpack_of_strings(self, _):
        return tried(lambda: pb_utils.Tensor("t", np.array([b"a"], dtype=object)).to_dlpack())

    def probe_input_that_is_not_there(self, request):
        return pb_utils.get_input_tensor_by_name(request, "X") is None

    # ---- requests -----------------------------------------------------------------------------

    def probe_request(self, request):
        return [
            request.request_id(),
            request.correlation_id(),
            request.flags(),
            request.timeout(),
            json.loads(request.parameters()),
            sorted(request.requested_output_names()),
            [one.name() for one in request.inputs()],
            request.is_cancelled(),
        ]

    def probe_request_of_wrong_parts(self, _):
        wrong = [{"outputs": "y"}, {"parameters": '{"a": 1}'}, {"correlation_id": 1.5}, {"request_id": 7}]
        return [tried(lambda one=one: asked(**one) and "made")["raised"] for one in wrong]

    def probe_request_of_bytes(self, _):
        made = asked(model=b"inner", outputs=[b"y"], name=b"x", request_id=b"r")
        return [
            sorted(made.requested_output_names()),
            made.request_id(),
            shown(made.exec()),
        ]

    def probe_request_that_lacks_parts(self, _):
        parts = {"model_name": "inner", "requested_output_names": ["y"], "inputs": []}
        lacking = [{key: value for key, value in parts.items() if key != one} for one in parts]
        wrong = [*lacking, *({**parts, key: None} for key in parts), {**parts, "requested_output_names": "y"}]
        wrong += [{**parts, "request_id": None}, {**parts, "model_version": None}, {**parts, "timeout": "1"}]
        return [raised(lambda one=one: pb_utils.InferenceRequest(**one)) for one in wrong]

    def probe_request_of_no_tensor(self, _):
        parts = {"model_name": "inner", "requested_output_names": ["y"], "request_id": "r"}
        return tried(lambda: pb_utils.InferenceRequest(inputs=[None], **parts))

    # ---- responses and errors -----------------------------------------------------------------

    def probe_error(self, _):
        error = pb_utils.TritonError("text")
        names = [
            "UNKNOWN",
            "INTERNAL",
            "NOT_FOUND",
            "INVALID_ARG",
            "UNAVAILABLE",
            "UNSUPPORTED",
            "ALREADY_EXISTS",
            "CANCELLED",
        ]
        codes = [int(getattr(pb_utils.TritonError, one)) for one in names]
        return [error.message(), int(error.code()), codes]

    def probe_response_of_wrong_parts(self, _):
        wrong = [{"output_tensors": [1]}, {"output_tensors": [], "error": "text"}]
        return [
            tried(lambda one=one: pb_utils.InferenceResponse(**one) and "made")["raised"] for one in wrong
        ]

    def probe_response_of_nothing(self, _):
        wrong = [([None],), (None,), ()]
        return [raised(lambda one=one: pb_utils.InferenceResponse(*one)) for one in wrong]

    def probe_error_of_bytes(self, _):
        return [
            pb_utils.TritonError(b"text").message(),
            pb_utils.Tensor(b"t", np.zeros(1)).name(),
            pb_utils.Tensor.from_dlpack(b"t", pb_utils.Tensor("u", np.zeros(1)).to_dlpack()).name(),
            tried(lambda: pb_utils.TritonError(7))["raised"],
        ]

    def probe_output_by_name(self, _):
        response = pb_utils.InferenceResponse([pb_utils.Tensor("a", np.zeros(1))])
        found = [pb_utils.get_output_tensor_by_name(response, name) for name in "ab"]
        return [None if one is None else one.name() for one in found]

    def probe_lookup_of_bytes(self, request):
        response = pb_utils.InferenceResponse([pb_utils.Tensor("a", np.zeros(1))])
        found = [
            pb_utils.get_output_tensor_by_name(response, b"a"),
            pb_utils.get_input_tensor_by_name(request, b"PROBE"),
        ]
        return [one is not None for one in found]

    # ---- other models -------------------------------------------------------------------------

    def probe_asks(self, _):
        return shown(asked().exec())

    def probe_asks_for_all_outputs(self, _):
        return shown(asked(outputs=()).exec())

    def probe_asks_a_version(self, _):
        return [shown(asked(model_version=version).exec()) for version in (1, -1)]

    def probe_asks_with_everything(self, _):
        return shown(asked(request_id="r", correlation_id=5, timeout=5_000_000, parameters={"a": 1}).exec())

    def probe_asks_no_model(self, _):
        return shown(asked("nope").exec())

    def probe_asks_no_version(self, _):
        return shown(asked(model_version=7).exec())

    def probe_asks_for_no_output(self, _):
        return shown(asked(outputs=["z"]).exec())

    def probe_asks_by_a_wrong_input(self, _):
        return [shown(one.exec()) for one in (asked(name="w"), asked(dtype=np.int32))]

    def probe_asks_what_is_refused(self, _):
        return shown(asked(x=[-1]).exec())

    def probe_asks_what_raises(self, _):
        return "code" in shown(asked(x=[7]).exec())

    def probe_asks_a_stream(self, _):
        return [shown(one) for one in asked("streams", x=[-3]).exec(decoupled=True)]

    def probe_asks_a_stream_that_ends_by_itself(self, _):
        return [shown(one) for one in asked("streams", x=[2]).exec(decoupled=True)]

    def probe_asks_one_as_a_stream(self, _):
        return [shown(one) for one in asked().exec(decoupled=True)]

    def probe_asks_a_stream_for_one(self, _):
        return shown(asked("streams", x=[2]).exec())

    def probe_asks_in_a_fork(self, _):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(ask_for_double, range(4))

    # ---- iterative sequences --------------------------------------------------------------------

    def iterated(self, n, model="iterates", rows=1, **more):
        return asked(model, ["iterations"], "n", [[n]] * rows, np.int32, **more)

    def probe_iterates(self, _):
        return [shown(self.iterated(n).exec()) for n in (1, 3)]

    def probe_iterates_in_a_sequence_of_the_client(self, _):
        return shown(self.iterated(3, correlation_id=77, flags=1).exec())

    def probe_asks_an_iteration_of_two_rows(self, _):
        return shown(self.iterated(2, rows=2).exec())

    def probe_iterates_and_raises(self, _):
        found = shown(self.iterated(-1).exec())
        return [found["code"], found["text"].splitlines()[0], shown(self.iterated(1).exec())]

    def probe_iterates_as_a_stream(self, _):
        return [shown(one) for one in self.iterated(3, "iterates_decoupled").exec(decoupled=True)][:3]

    # ---- the server ---------------------------------------------------------------------------

    def probe_ready(self, _):
        return [
            pb_utils.is_model_ready("inner"),
            pb_utils.is_model_ready(model_name="inner", model_version="1"),
            pb_utils.is_model_ready("inner", "7"),
            pb_utils.is_model_ready("nope"),
        ]

    def probe_unloads_and_loads(self, _):
        pb_utils.unload_model("streams")
        before = pb_utils.is_model_ready("streams")
        pb_utils.load_model(model_name="streams")
        return [before, pb_utils.is_model_ready("streams")]

    def probe_logs(self, _):
        log = pb_utils.Logger
        said = [log.log_info("a"), log.log_warn("b"), log.log_error("c"), log.log_verbose("d")]
        return [*said, log.log("e"), log.log("f", log.WARNING)]

    def probe_logs_wrongly(self, _):
        log = pb_utils.Logger
        wrong = [(None,), (7,), ("m", None), ("m", 1), (b"m",)]
        return [raised(lambda one=one: log.log(*one)) for one in wrong] + [raised(lambda: log.log_info(None))]

    def probe_metrics(self, _):
        family = pb_utils.MetricFamily
        count = family(name="probe_total", description="Of probes.", kind=family.COUNTER)
        level = family(name="probe_level", description="Of probes.", kind=family.GAUGE)
        sizes = family(name="probe_sizes", description="Of probes.", kind=family.HISTOGRAM)
        counted, again = count.Metric(labels={"a": "b"}), count.Metric(labels={"a": "b"})
        at, size = level.Metric(), sizes.Metric(labels={"a": "b"}, buckets=[1.0, 2.0])
        self.kept += [count, level, sizes, counted, again, at, size]
        counted.increment(2)
        at.set(5)
        at.increment(-1.5)
        size.observe(1.5)
        return [counted.value(), again.value(), at.value()]

    def probe_metric_without_its_buckets(self, _):
        family = pb_utils.MetricFamily(
            name="probe_other", description="", kind=pb_utils.MetricFamily.HISTOGRAM
        )
        self.kept.append(family)
        return tried(lambda: family.Metric() and "made")["raised"]
