"""Triton model repositories: folders of models with config.pbtxt, read as configurations."""
