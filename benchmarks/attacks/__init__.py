"""``scripts/attack``: one hostile client, and what a well-behaved one beside it sees.

``__main__.py`` is the command line and the run, ``attacked.py`` has the servers that are attacked and reads
what they hold, ``limits.py`` judges. ``attacker.py`` is the process of one attack: of ``floods.py``,
``bodies.py``, ``waiting.py`` or ``deaths.py``, by ``connections.py`` and ``requests.py``. ``bystander.py`` is
the client beside it. The attacker yields the CPU to everybody else, for it is the server that is measured.
"""
