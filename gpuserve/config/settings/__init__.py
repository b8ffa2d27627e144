"""The settings of a server, the checks of settings, and the log that settings configure."""
