"""A program that has its tensors in device memory, by tritonclient's own means. Prints what it got, as JSON.

Arguments: the protocol, the address, a model that doubles its input.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.cuda_shared_memory as cuda

NBYTES = 64


def main(protocol: str, address: str, model: str) -> None:
    library = tritonclient.grpc if protocol == "grpc" else tritonclient.http
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    regions = {name: cuda.create_shared_memory_region(name, NBYTES, 0) for name in ("in", "out")}
    cuda.set_shared_memory_region(regions["in"], [x])
    with library.InferenceServerClient(address) as client:
        client.unregister_cuda_shared_memory()
        for name, region in regions.items():
            client.register_cuda_shared_memory(name, cuda.get_raw_handle(region), 0, NBYTES)
        given, wanted = library.InferInput("x", [2, 4], "FP32"), library.InferRequestedOutput("y")
        given.set_shared_memory("in", x.nbytes)
        wanted.set_shared_memory("out", x.nbytes)
        client.infer(model, [given], outputs=[wanted])
        client.unregister_cuda_shared_memory()
    print(json.dumps(cuda.get_contents_as_numpy(regions["out"], np.float32, [2, 4]).tolist()))
    for region in regions.values():
        cuda.destroy_shared_memory_region(region)


main(*sys.argv[1:])
