"""The sections, a file each: a function ``run`` that is given a ``Site`` and writes into its ``Findings``."""
