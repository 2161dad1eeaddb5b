"""For all tests: hypothesis without its clock, which measures how busy the machine is; Ctrl-C as in a terminal."""

import signal

from hypothesis import settings

settings.register_profile("onechip", deadline=None)
settings.load_profile("onechip")

# A shell's background jobs are started with SIGINT ignored, and what they start too: tests that interrupt would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
