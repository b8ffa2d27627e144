"""``gpuserve new``: creation of a project from the templates of its kind."""
