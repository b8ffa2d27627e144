"""Scenarios: what happens to one server over time, each with a goal of its own.

The rows of the other benchmarks compare servers under one load each; here a server is held against what is
possible, or against itself. ``scripts/bench --scenarios`` runs them. Who knows what::

    scenario.py     what a scenario is, where it runs        command.py       the command line
    figures.py      goals, samples, percentiles, slopes      report.py        figures to Markdown and JSON
    arrivals.py     when requests come                       ideal.py         the ideal server, simulated
    deployment.py   the models, and who serves them          payload.py       the request and its answer
    open_loop.py    starts the open-loop client              paced_client.py  is the open-loop client
    closed_loop.py  starts h2load

and one file a scenario: ``tail.py``, ``deadlines.py``, ``fairness.py``, ``scaling.py``,
``many_models.py``, ``connections.py``, ``endurance.py``, ``starting.py``.
"""
