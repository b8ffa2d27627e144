"""A directory for the import path of programs run by ``gpuserve run``; see ``pytriton/alias.py``. It holds
only packages that put the real ones in their own place.
"""
