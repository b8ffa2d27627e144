"""Refuses the import of the package where the machine has no cupy."""

from cuda_simulation import driver, machine

machine.require("cupy")
driver.install()
