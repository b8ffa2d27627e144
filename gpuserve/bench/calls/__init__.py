"""Calls to a server on the wire, and the processes that make them."""
