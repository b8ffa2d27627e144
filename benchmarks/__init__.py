"""The benchmarks: this server and its peers on the same models under the same load.

``scripts/bench`` runs them. Who knows what::

    __main__.py    the command line                      sections.py    what a section of the report is
    peers.py       how the other servers are installed   servers/       how each is started and asked
    models/        the models, as each server has them   payloads.py    requests, and the check of answers
    load.py        the load generators                   *_client.py    those of our own, on http2.py
    rows.py        the lines of the table, their goals   rounds.py      the interleaved measurement
    memcpy.py      a floor: one copy of the tensor       comparison.py  ratios, the best peer, goals reached
    processes.py   /proc: CPU and memory of a tree       footprint.py   memory, start and import
    report.py      the report, as Markdown and JSON      tables.py      Markdown tables
    plots.py       curves to PNG and SVG                 costs.py       a MiB of each kind of input

The sections: ``request_section.py`` (the rows), ``sweeps.py`` (the plots), ``footprint_sections.py``, and
``model_files/`` (files served without code, against their runtimes in a loop). What
happens over time to one server is in ``scenarios/``, which has a command line of its own; what a request
costs without a network server around it, in ``profile/``; what ``scripts/gpu_check`` measures on a GPU, in
``gpu/``; what hostile clients do to others, in ``attacks/``.
"""
