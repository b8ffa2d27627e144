"""``model.py`` files under both servers: one repository, of which one model does what a request names.

Every call of ``triton_python_backend_utils`` is a method of ``repository/probe``; what it tells is compared.
"""
