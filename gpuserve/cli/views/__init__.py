"""What a command prints: tables, lines and whole screens, as text. Nothing is asked here."""
