"""The differences of ``model.py`` files that are meant: ``MODEL_PY``. Data only."""

from __future__ import annotations

from triton_differences.expected import Meant, Rule
from triton_differences.model_py.configs import REFUSED_HERE

MODEL_PY: tuple[Meant, ...] = (
    Meant(
        "`error().code()` of a response to `InferenceRequest.exec`",
        "INTERNAL, whatever it was",
        "what it was: NOT_FOUND, INVALID_ARG, UNSUPPORTED, or the code that the other model gave",
        "A model can tell a wrong request from a fault.",
        (Rule(("model.py: asks_*",), "said*.code", "1"),),
    ),
    Meant(
        "`exec(decoupled=True)` of a model that ends its responses by the final flag alone",
        "an empty response at the end",
        "none",
        "What can be iterated is what the other model sent.",
        (Rule(("model.py: asks_a_stream_*",), "said.length"),),
    ),
    Meant(
        "`Tensor.triton_dtype()`",
        "raises TypeError in this release",
        "the number of the datatype",
        "As documented.",
        (Rule(("model.py: tensor_datatype",), "said"),),
    ),
    Meant(
        "`Tensor.from_dlpack` of a numpy array",
        "ends the process of the model",
        "a tensor over its memory",
        "As documented: anything that has `__dlpack__`.",
        (Rule(("model.py: dlpack_of_numpy",)),),
    ),
    Meant(
        "A config.pbtxt with two tensors of one name, a negative count of instances, passive instances "
        "alone, or a resource without a name",
        "loaded",
        "refused, with the place in the file",
        "Such a file is a mistake; a model of passive instances alone answers no request.",
        (Rule(tuple(f"model.py: config {name}" for name in sorted(REFUSED_HERE)), "loaded"),),
    ),
    Meant(
        "`exec` in a process that `execute` forks",
        "answered; in one of four runs not within 30 s",
        "a response with the error UNAVAILABLE, which says to use threads",
        "A forked process would write to its parent's socket; threads ask in parallel just as well.",
        (Rule(("model.py: asks_in_a_fork",)),),
    ),
    Meant(
        "`TritonError.CANCELLED` over HTTP",
        "400",
        "499",
        "As a request that its client cancels.",
        (Rule(("model.py: execute_cancelled",), "status"),),
    ),
    Meant(
        "A counter that is decremented or set, a value asked of a histogram",
        "ends the process of the model",
        "TritonModelException, with what can be done",
        "A mistake in a metric costs no request.",
        (),
    ),
)
