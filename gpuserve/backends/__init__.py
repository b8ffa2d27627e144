"""Backends: what a model is made of if it is not the user's own callable.

Model files are served without code: there is an ordinary callable class for each kind of file (``onnx``,
``pytorch``, ``sklearn``, ``huggingface``), and ``registry`` selects the class by the name of a file or the
content of a folder. The class gets the file and the options of its library; its ``declare`` reads the tensors
from the file. ``python_backend`` runs the ``model.py`` files of Triton. ``environments`` runs workers in
other Python environments.

The server processes import none of the classes, only workers and the processes that describe callables do.
"""
