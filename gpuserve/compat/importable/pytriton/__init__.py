"""What ``import pytriton`` finds: it puts ``gpuserve.compat.pytriton`` in its own place."""

import sys

import gpuserve.compat.pytriton
from gpuserve.compat.pytriton.alias import install

install()
sys.modules[__name__] = gpuserve.compat.pytriton
