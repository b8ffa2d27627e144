"""What ``scripts/gpu_check`` does on a machine with a GPU: tests, figures, a profile, faults; one report.

Each section runs in a process of its own, so that one that crashes, hangs or leaves its device in error takes
nothing else with it. Who knows what::

    __main__.py          the command line                  machine.py     what the machine is
    catalog.py           the sections, in their order      section.py     what a section is given and finds
    running_sections.py  starts them, ends those too slow  section_process.py  is one of them
    report.py            Markdown and JSON                 environment.py an environment without a network
    serving.py           a server of a section's models    load.py, load_client.py  closed loops over gRPC
    messages.py          requests                          calls.py       single calls
    client_memory.py     regions of clients                bare_loop.py   networks with and without a server
    device_memory.py     how much of it is in use          stand_in.py    CUDA where there is none
    models/              what is served                    timeline.py    spans of time to a picture

and one file a section: ``facts.py`` (which asks ``questions.py``), ``device_tests.py``, ``bandwidth.py``,
``overlap.py``, ``networks.py``, ``instances.py``, ``cuda_ipc.py``, ``sentences.py``, ``peers.py``,
``profile.py``, ``faults.py``.
"""
