"""``scripts/fuzz``: inputs without an end for what reads bytes of others, each judged by another reader.

A target is a file with ``INPUTS``, which makes inputs, and ``check``, which fails for one that is not read
as it should be: ``targets.py`` has all of them. What has failed once is kept in ``corpus/`` and is tried by
``tests/unit/test_fuzzing.py`` with every run of the tests.
"""
