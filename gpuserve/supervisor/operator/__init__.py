"""What an operator asks of a running server: the socket that he asks by, and what each verb does. Models are
loaded and unloaded as for anybody else; what a changed config means is in ``supervisor/reload``.
"""
