"""Processes of a server other than workers, and their listeners and log lines."""
