"""The echo models as MLServer runs them, in its inference worker. ``mlserver/`` has their settings.

Without adaptive batching: it needs a delay, and would be more work for an echo.
"""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Echo(MLModel):
    """The model y = x for arrays of FP32."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = NumpyCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", x)])


class EchoBytes(MLModel):
    """The model y = x for strings."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        given = payload.inputs[0]
        y = StringCodec.encode_output("y", StringCodec.decode_input(given))
        y.shape = given.shape
        return InferenceResponse(model_name=self.name, outputs=[y])
