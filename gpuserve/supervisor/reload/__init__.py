"""A config file that has changed while its server runs: what is different, in which order it is done, and how
it ended. Who reads the file, and who loads a model, is elsewhere.
"""
