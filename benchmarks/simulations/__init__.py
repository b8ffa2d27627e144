"""Simulations that decide what is built, before it is built. Seeded, and nothing here starts a server.

``python -m benchmarks.simulations`` prints the tables of several front processes before the same workers,
``python -m benchmarks.simulations.autoscaling`` those of pods under an autoscaler of Kubernetes, and
``python -m benchmarks.simulations.capacity`` the rates at which fronts and nodes are full. Who knows what::

    setting.py     what is simulated, and at which front a connection ends
    fronts.py      the simulation               outcome.py     what came of a run
    __main__.py    the cases and the tables     capacity.py    one front, one node, a fleet
    autoscaling/   the autoscaler and its fleet
"""
