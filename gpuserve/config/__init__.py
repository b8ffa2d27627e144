"""The configuration of a server: what may be written (``schema``), where it was written
(``positions``), what overrides it (``precedence``), what else must hold (``rules``), how a mistake
is told (``messages``), and what it comes to (``convert``). ``load`` puts them together.

Nothing here imports user code, looks for a device or starts a process.
"""
