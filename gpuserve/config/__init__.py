"""The configuration of a server: settings, config files, Triton model repositories."""
