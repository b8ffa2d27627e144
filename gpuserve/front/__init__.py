"""The front process: it speaks to clients, forms batches and hands them to workers. It never imports user
code or CUDA, and keeps nothing that the supervisor could not tell it again.
"""
