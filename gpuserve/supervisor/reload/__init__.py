"""Reload of the config and of changed model files while the server runs."""
