"""What a callable says of itself: its tensors, its batch size, and whatever else an entry of a config file
may say. ``declaration.py`` reads it from the object; ``asking.py`` has a short-lived child process
(``child.py``) do that, so that user code runs neither in the command line nor in the supervisor. Nothing is
served here.
"""
