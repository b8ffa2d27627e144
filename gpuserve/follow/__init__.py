"""The event stream of a running server, as a program or a command of the same machine follows it."""
