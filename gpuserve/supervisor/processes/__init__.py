"""Processes of a server other than workers: child processes, the front, ingress processes, listeners, log
lines.
"""
