"""Errors are reported and raised again."""

import logging
import sys

import pytest

from xlstm_jax.utils.error_logging_utils import with_error_handling


class Flushes:
    """A stream that counts its flushes."""

    def __init__(self):
        self.count = 0

    def write(self, text):
        """Swallow the text."""

    def flush(self):
        """Count."""
        self.count += 1


def failing(error):
    raise error


def test_a_function_that_does_not_fail_keeps_its_result_name_and_arguments(caplog, capfd):
    @with_error_handling(logger=logging.getLogger("test"))
    def add(a, *, b):
        """Add."""
        return a + b

    assert add(1, b=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError("a reason"), KeyboardInterrupt("a reason"), SystemExit("a reason")])
def test_an_error_is_logged_with_its_traceback_and_raised_again(error, caplog):
    with pytest.raises(type(error)) as caught:
        with_error_handling(logger=logging.getLogger("test"))(failing)(error)
    assert caught.value is error
    message, trace = caplog.records
    assert message.levelno == trace.levelno == logging.ERROR
    assert "a reason" in message.getMessage()
    assert "in failing" in trace.getMessage()
    assert type(error).__name__ in message.getMessage()


def test_a_percent_sign_in_an_error_is_logged_as_it_is(caplog):
    with pytest.raises(ValueError, match="100%"):
        with_error_handling(logger=logging.getLogger("test"))(failing)(ValueError("100% d %s"))
    assert all("100% d %s" in record.getMessage() for record in caplog.records)


def test_without_a_logger_the_traceback_goes_to_stderr(capfd):
    with pytest.raises(ValueError, match="a reason"):
        with_error_handling()(failing)(ValueError("a reason"))
    out, err = capfd.readouterr()
    assert not out
    assert "Traceback" in err
    assert "ValueError: a reason" in err


@pytest.mark.parametrize("flush_output", [True, False])
def test_output_is_flushed_only_if_asked(flush_output, monkeypatch):
    stdout, stderr = Flushes(), Flushes()
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    handled = with_error_handling(flush_output=flush_output, logger=logging.getLogger("test"))
    assert handled(abs)(-1) == 1
    with pytest.raises(ValueError, match="a reason"):
        handled(failing)(ValueError("a reason"))
    assert stdout.count == stderr.count == (2 if flush_output else 0)
