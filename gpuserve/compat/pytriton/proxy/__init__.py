"""The types of an inference callable's arguments, at PyTriton's import path."""
