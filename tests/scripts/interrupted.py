"""A train script that interrupts itself: `python interrupted.py SIGNAL AFTER SECONDS SCRIPT ARGUMENTS...`

Whoever watches a script from outside may sleep through the moment on a busy machine. Here the process sends
itself the signal, SECONDS after the row of step AFTER was written and wherever it is then, and before any
further row.
"""

import os
import runpy
import sys
import threading
import time

import rft_fn as rft

number, after, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
sys.argv = sys.argv[4:]
write, sent = rft.run.Run.write, threading.Event()


def interrupt():
    time.sleep(seconds)
    os.kill(os.getpid(), number)
    sent.set()


def watched(self, step, *args, **options):
    if step > after:
        sent.wait()
    write(self, step, *args, **options)
    if step == after:
        threading.Thread(target=interrupt, daemon=True).start()


rft.run.Run.write = watched
runpy.run_path(sys.argv[0], run_name="__main__")
