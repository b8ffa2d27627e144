"""The pictures of the documentation, drawn of the tables and names of the code. ``python docs/site/draw.py``
writes them; nothing here knows Sphinx.
"""
