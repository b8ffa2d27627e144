"""From what was counted to figures, tables, plots and files."""
