"""The configuration of a server: schema, positions, precedence, rules, messages, conversion, which ``load``
puts together. Nothing here imports user code, looks for a device or starts a process.
"""
