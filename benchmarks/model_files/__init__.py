"""Model files, served without code, against the runtime that reads them in a bare loop.

``files.py`` makes the files and is the table of them; ``bare.py`` is the loop; ``servers.py`` has those that
serve one file each; ``section.py`` measures.
"""
