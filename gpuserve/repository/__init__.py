"""Triton's model repositories: folders of models, each with a config.pbtxt and version folders, to the models
of a configuration. ``pbtxt`` reads the text with the place of every value, ``fields`` says of every field of
a ``ModelConfig`` whether it is honoured, ``folders`` looks at the disk, ``translation`` and what it calls
turn all that into entries of a config file, and ``load`` puts them together. No callable is imported here.
"""
