"""Who may ask for what, and what every door needs of a request's head and connection."""
