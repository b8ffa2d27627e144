"""Sends the same requests to this server and to Triton and compares what comes back.

::

    cases/      what is sent: a table of small requests for each part of the protocol
    models/     the same models, written once for each server
    model_table how each model is declared to each server
    wire        sends one step of a case and reads its answer
    answers     what is kept of an answer (pure)
    compare     equal, other text, or different (pure)
    expected    the differences that are meant, with the reason (docs/compatibility.md shows them)
    report      the tables that are printed (pure)

``scripts/compare_with_triton`` runs it. Nothing here is a test; ``tests/unit/test_triton_differences.py``
tests it.
"""
