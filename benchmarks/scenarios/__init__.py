"""Scenarios: what happens to one server over time, each with a goal of its own.

The rows of the other benchmarks compare servers under one load each; here a server is held against what is
possible, or against itself. ``scripts/bench --scenarios`` runs them: ``command.py``. ``scenario.py`` says
what a scenario is and serves its models; ``open_loop.py``, ``closed_loop.py`` and ``starting.py`` have the
scenarios, ``loads.py`` and ``paced_client.py`` the open loop, ``ideal.py`` the ideal server.
"""
