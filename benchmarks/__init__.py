"""The benchmarks: this server, PyTriton and plain Triton on the same models under the same load.

``scripts/bench`` runs them. Who knows what::

    peers.py      how the other servers are installed            servers.py    how each server is started
    load.py       the load generators, one ``LoadResult`` a run  rows.py       the lines of the table
    payloads.py   the requests, and the check of the answers     processes.py  /proc: CPU and memory of a tree
    rounds.py     the interleaved measurement                    footprint.py  memory, start and import
    report.py     samples to medians, ratios, Markdown, JSON     __main__.py   the command line
    models/       the models, as each server takes them          stream_client.py  times first responses
"""
