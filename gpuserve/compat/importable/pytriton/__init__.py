"""A stand-in for ``pytriton`` that replaces itself by ``gpuserve.compat.pytriton``."""

import sys

import gpuserve.compat.pytriton
from gpuserve.compat.pytriton.alias import install

install()
sys.modules[__name__] = gpuserve.compat.pytriton
