"""A model file of ONNX as MLServer runs one, in its inference worker."""

from __future__ import annotations

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxFile(MLModel):
    """The one input ``x`` and the one output ``y`` of a file."""

    async def load(self) -> bool:
        path = self._settings.parameters.uri
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        (answer,) = self._session.run(None, {"x": rows})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", answer)])
