"""The recording in the README: a session typed into a real shell in a pseudo-terminal (``session``), what the
screen shows at each moment (``screens``), and that as one animated SVG (``animation``).
"""
