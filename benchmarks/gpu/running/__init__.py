"""What runs sections and reports: the machine, a process for each section, its budget, the report."""
