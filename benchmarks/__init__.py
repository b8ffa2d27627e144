"""The benchmarks: this server, PyTriton and plain Triton on the same echo model under the same load.

``scripts/bench`` runs them. Who knows what::

    peers.py      how the other servers are installed            servers.py    how each server is started
    load.py       h2load and wrk: one run, one ``LoadResult``    rows.py       the lines of the table
    payloads.py   the request bodies, and the answers' check     processes.py  /proc: CPU and memory of a tree
    rounds.py     the interleaved measurement                    footprint.py  memory, start and import
    report.py     samples to medians, ratios, Markdown, JSON     __main__.py   the command line
"""
