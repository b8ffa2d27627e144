"""Protocols between the processes of a server, for the front and commands as well: no other imports."""
