"""What is read from the stacks of a process."""

from __future__ import annotations

import os
import sys

from gpuserve.supervisor.processes.child_supervision import missing_stacks_reason, readable_stacks, user_frame

STACKS = f"""Current thread 0x00007f0000000001 (most recent call first):
  File "{os.getcwd()}/gpuserve_worker/execution/lifecycle.py", line 62 in _listen
  File "{sys.prefix}/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f0000000002 (most recent call first):
  File "/home/me/loader.py", line 3 in fill

Thread 0x00007f0000000003 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 705 in readinto
  File "/venv/lib/python3.11/site-packages/hub/get.py", line 9 in get
  File "/home/me/model.py", line 12 in __init__
  File "{os.getcwd()}/gpuserve_worker/loading.py", line 40 in load_model
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_the_main_thread_comes_first_and_the_one_that_listens_not_at_all() -> None:
    lines = readable_stacks(STACKS).splitlines()
    assert lines[0] == "Main thread 0x00007f0000000003 (most recent call first):"
    assert lines[7] == "Thread 0x00007f0000000002 (most recent call first):"
    assert "supervision" not in readable_stacks(STACKS)


def test_what_is_no_stack_or_has_none_of_the_user_is_told_as_it_is() -> None:
    assert user_frame(STACKS) == "/home/me/model.py:12 in __init__"
    assert user_frame("") == ""
    assert readable_stacks("  nonsense\n") == "nonsense"
    assert missing_stacks_reason(os.getpid()) == f"(no stacks of process {os.getpid()}: it runs)"
