"""Signals that ask a run to stop."""

import logging
import os
import signal

from xlstm_jax.trainer.run import signals
from xlstm_jax.trainer.run.signals import Interrupts


class InterruptedStream:
    """A stream that is just being written to."""

    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")


def test_a_signal_that_interrupts_a_log_line_stops_the_run_without_a_traceback(capsys):
    handler = logging.StreamHandler(InterruptedStream())
    signals.LOGGER.addHandler(handler)
    try:
        with Interrupts().watch() as interrupts:
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.received(1, may_wait=False) == signal.SIGTERM
    finally:
        signals.LOGGER.removeHandler(handler)
    assert capsys.readouterr().err == ""
    assert logging.raiseExceptions
