"""Where the stand-in for CUDA is as unkind as a GPU: what a copy, a kernel and a product raise, as JSON."""

import json

import cupy
import numpy as np


def compiles():
    """A copy, which needs no compiler, and then the kinds of work that need one, by what is raised."""
    found = {"copied": cupy.zeros(4, np.float32).get().tolist()}
    for name, call in {
        "kernel": lambda: cupy.zeros(4) + 1,
        "product": lambda: cupy.zeros((2, 2)) @ cupy.zeros((2, 2)),
    }.items():
        try:
            call()
        except RuntimeError as error:
            found[name] = f"{type(error).__module__}.{type(error).__name__}"
        else:
            found[name] = ""
    return found


if __name__ == "__main__":
    print(json.dumps(compiles()))
