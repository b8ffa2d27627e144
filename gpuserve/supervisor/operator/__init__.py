"""Operator commands: verbs, status and drains of a running server."""
