"""The front process: its set-up from the supervisor's messages, and its life until it exits."""
