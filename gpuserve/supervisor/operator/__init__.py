"""What an operator asks of a running server: the socket that he asks by, and what each verb does."""
