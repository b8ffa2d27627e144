"""What ``scripts/gpu_check`` does on a machine with a GPU: facts, tests, figures, faults; one report.

Each section runs in a process of its own, so that one that crashes, hangs or leaves its device in error takes
nothing else with it. Who knows what::

    __main__.py   the command line            catalog.py    the sections, in their order
    places.py     where the checkout is       models/       what is served
    running/      section.py     what a section is given and finds     section_process.py  is one of them
                  one_by_one.py  starts them, ends those too slow      report.py   Markdown and JSON
                  machine.py     what the machine is                   stand_in.py CUDA where there is none
                  environment.py an environment without a network
    sections/     one file a section
    served/       serving.py     a server of a section's models        messages.py requests
                  load.py, load_client.py  closed loops over gRPC      calls.py    single calls
                  client_memory.py regions of clients                  bare_loop.py networks without a server
                  device_memory.py how much of it is in use            timeline.py spans of time to a picture
    questions/    asked of the device by sections/facts.py
"""
