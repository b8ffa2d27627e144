"""Simulations that decide what is built, before it is built. Seeded, and nothing here starts a server.

``python -m benchmarks.simulations`` prints the tables of the one there is: several front processes before the
same workers. Who knows what::

    setting.py     what is simulated, and at which front a connection ends
    fronts.py      the simulation               outcome.py     what came of a run
    __main__.py    the cases and the tables
"""
