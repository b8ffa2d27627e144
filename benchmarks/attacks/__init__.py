"""``scripts/attack``: one hostile client, and what a well-behaved one beside it sees. Who knows what::

    __main__.py    the command line and the table     limits.py        what is held, and what was seen
    bystander.py   the well-behaved client            watched.py       memory and descriptors of the server
    attacker.py    the hostile one, by its name       connections.py   its connections, many of them
    requests.py    what is sent, right and wrong      catalog.py       all attacks by their names
    floods.py      frames and bytes without an end    bodies.py        claims, bombs, large bodies
    waiting.py     connections that do nothing more

The client and the attacker are processes of their own; the attacker yields the CPU to everybody else, for
it is the server that is measured.
"""
