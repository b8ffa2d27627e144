"""What the verbs of the command line share: options, views, exit statuses, checks before serving."""
