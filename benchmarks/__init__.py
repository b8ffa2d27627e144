"""The benchmarks: this server and its peers on the same models under the same load. ``scripts/bench`` runs
them.

The sections of ``__main__.py``, the command line: ``request_section.py`` (the rows of ``rows.py`` and
``extra_rows.py``) and ``footprint.py`` (memory, start and import). ``peers.py`` installs the other servers
and ``servers/`` starts them with ``models/``; ``payloads.py`` has the requests and the check of answers,
``load.py`` the load generators, ``rounds.py`` the interleaved measurement, ``report.py`` the report, and
``command_line.py`` what all command lines share. What inputs cost is in ``costs.py``; Python calls of a
request, in ``profile/``; what ``scripts/gpu_check`` measures on a GPU, in ``gpu/``; what hostile clients do
to others, in ``attacks/``.
"""
