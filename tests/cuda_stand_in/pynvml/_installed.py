"""Refuses the import of the package where the machine has no nvidia-ml-py."""

from cuda_simulation import machine

machine.require("pynvml")
