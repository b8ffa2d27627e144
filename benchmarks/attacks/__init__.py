"""``scripts/attack``: one hostile client, and what a well-behaved one beside it sees. Who knows what::

    __main__.py    the command line and the run       limits.py        limits, findings, tables
    attacked.py    the servers that are attacked      watched.py       memory, descriptors, metrics
    bystander.py   the well-behaved client            attacker.py      the process of one attack
    connections.py the connections of the attacker    requests.py      what is sent, right and wrong
    catalog.py     all attacks by their names         cases.py         an attack, its server and its limits
    floods.py      frames and bytes without an end    bodies.py        claims, bombs, large bodies
    waiting.py     connections that do nothing more   openai.py        requests of OpenAI's clients
    deaths.py      deaths, descriptors used up        operator.py      configurations that are reloaded

The client and the attacker are processes of their own; the attacker yields the CPU to everybody else, for
it is the server that is measured.
"""
