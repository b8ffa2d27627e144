"""Protocols between the processes of a server: messages, addresses, sockets and heartbeats. This package
imports no other part of the supervisor, because the front and commands import it.
"""
