"""Ingress processes, which hold client connections, and the IPC channel between them and the front."""
