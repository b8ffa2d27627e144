"""The doors of a front that are processes: started, given their connections, watched, replaced, counted."""
