"""Does what a request says, as JSON: asks models, loads them, logs, counts; and tells what came."""

import argparse
import json
import multiprocessing
import sys
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


def shown(response):
    if response.has_error():
        return [response.error().code(), response.error().message()]
    return {
        one.name(): [str(v) for v in one.as_numpy().ravel().tolist()] for one in response.output_tensors()
    }


def request(order):
    x = pb_utils.Tensor(
        order.pop("input", "X"), np.array(order.pop("x", [1, 2]), order.pop("dtype", "float32"))
    )
    return pb_utils.InferenceRequest(inputs=[x], **order)


def ask_in_child(order):
    return shown(request(order).exec())


def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "ORDER", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "SAID", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        self.name = args["model_name"]
        family = pb_utils.MetricFamily("orders_total", "Orders.", pb_utils.MetricFamily.COUNTER)
        self.orders = family.Metric(labels={"model": self.name})
        pb_utils.Logger.log_info("initialized")

    def execute(self, requests):
        return [self.answer(one) for one in requests]

    def answer(self, one):
        order = json.loads(pb_utils.get_input_tensor_by_name(one, "ORDER").as_numpy()[0])
        self.orders.increment(1)
        try:
            said = getattr(self, order.pop("do"))(order)
        except pb_utils.TritonModelException as error:
            said = f"raised: {error}"
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("SAID", np.array([json.dumps(said)], dtype=object))]
        )

    def exec(self, order):
        return shown(request(order).exec())

    def stream(self, order):
        return [shown(one) for one in request(order).exec(decoupled=True)]

    def first_of_stream(self, order):
        return shown(next(iter(request(order).exec(decoupled=True))))

    def in_thread(self, order):
        said = []
        thread = threading.Thread(target=lambda: said.append(shown(request(order).exec())))
        thread.start()
        thread.join()
        return said[0]

    def in_fork(self, order):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(ask_in_child, (order,))

    def process(self, order):
        import c_python_backend_utils

        assert c_python_backend_utils.Tensor is pb_utils.Tensor
        return [
            sys.argv,
            sys.path[0],
            vars(argparse.ArgumentParser().parse_args()),
            hasattr(sys.modules["__main__"], "__file__"),
        ]

    def bytes(self, order):
        x = pb_utils.Tensor(b"X", np.array([1, 2], np.float32))
        asked = pb_utils.InferenceRequest(
            model_name=b"asked", requested_output_names=[b"Y"], inputs=[x], request_id=b"r"
        )
        return [asked.request_id(), shown(asked.exec()), pb_utils.TritonError(b"no").message()]

    def requests(self, order):
        return [raised(lambda one=one: pb_utils.InferenceRequest(**one)) for one in order["of"]]

    def no_tensor(self, order):
        parts = {"model_name": "m", "requested_output_names": [], "request_id": "r"}
        return [
            raised(lambda: pb_utils.InferenceRequest(inputs=[None], **parts)),
            raised(lambda: pb_utils.InferenceResponse([None])),
            raised(lambda: pb_utils.Logger.log("m", None)),
            raised(lambda: pb_utils.Logger.log(None)),
        ]

    def chain(self, order):
        response = request(order).exec()
        inner = pb_utils.get_output_tensor_by_name(response, "Y")
        again = pb_utils.InferenceRequest(
            model_name="asked",
            requested_output_names=["Y"],
            inputs=[pb_utils.Tensor.from_dlpack("X", inner.to_dlpack())],
        )
        return shown(again.exec())

    def models(self, order):
        call = {
            "load": pb_utils.load_model,
            "unload": pb_utils.unload_model,
            "ready": pb_utils.is_model_ready,
        }
        return call[order.pop("verb")](**order)

    def log(self, order):
        for level in ("log_info", "log_warn", "log_error", "log_verbose"):
            getattr(pb_utils.Logger, level)(f"{order['text']} {level}")
        pb_utils.Logger.log(f"{order['text']} log", pb_utils.Logger.WARNING)

    def metrics(self, order):
        kind = getattr(pb_utils.MetricFamily, order["kind"])
        family = pb_utils.MetricFamily(name=order["name"], description="Made late.", kind=kind)
        metric = family.Metric(labels=order.get("labels"), buckets=order.get("buckets"))
        getattr(metric, order["call"])(*order["values"])
        return metric.value() if order["kind"] != "HISTOGRAM" else None
