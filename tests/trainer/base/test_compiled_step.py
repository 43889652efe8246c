"""The training step is compiled once, ahead of time, and a step without room is an error of its own."""

import jax
import pytest
from trainer.runs import LENGTH, ROWS, TokenLoader, make_trainer

from xlstm_jax.trainer.base.compiled_step import StepDoesNotFitError, memory_limit

pytestmark = pytest.mark.slow

COMPILATION = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """The programs that are compiled or read from the cache, in seconds."""
    seconds = []

    def listen(event, duration, **_):
        if event == COMPILATION:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(listen)


def test_the_first_step_does_not_compile_again(compilations):
    trainer = make_trainer({"dp": 2, "fsdp": 2, "tp": 2})
    loader = TokenLoader(trainer.mesh, rows=ROWS, length=LENGTH)
    trainer.compile_train_step()
    batch, metrics = next(loader), trainer.init_train_metrics()
    compilations.clear()
    trainer.train_step(trainer.state, batch, metrics)
    assert compilations == []


def test_the_compiled_step_says_what_it_needs():
    trainer = make_trainer()
    memory = trainer.compile_train_step()
    state = sum(x.nbytes for x in jax.tree.leaves(trainer.state))
    assert memory.arguments >= state
    assert memory.peak > memory.arguments
    assert trainer.compile_train_step() is memory


def test_a_run_that_is_debugged_compiles_nothing():
    assert make_trainer(debug=True).compile_train_step() is None


@pytest.fixture
def compiler_options(monkeypatch):
    """The options that reach the compiler, with each program."""
    from jax._src import compiler

    options, compile_program = [], compiler.compile_or_get_cached

    def listen(backend, computation, devices, compile_options, *rest, **named):
        options.append(dict(compile_options.env_option_overrides))
        return compile_program(backend, computation, devices, compile_options, *rest, **named)

    monkeypatch.setattr(compiler, "compile_or_get_cached", listen)
    return options


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_compiler_is_told_that_steps_have_to_be_deterministic(deterministic, compiler_options):
    trainer = make_trainer(deterministic=deterministic)
    compiler_options.clear()
    trainer.compile_train_step()
    assert compiler_options[-1] == ({"xla_gpu_deterministic_ops": True} if deterministic else {})


def test_a_run_that_is_debugged_cannot_be_deterministic_by_its_compiler():
    with pytest.raises(ValueError, match="deterministic has no effect with debug"):
        make_trainer(deterministic=True, debug=True)


def fail_with(message):
    def step(*_):
        raise jax.errors.JaxRuntimeError(message)

    return step


def test_a_first_step_that_runs_out_of_memory_is_reported_as_such():
    trainer = make_trainer()
    trainer.progress.train_metrics = {}
    trainer.train_step = fail_with("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    with pytest.raises(StepDoesNotFitError, match="ran out of memory"):
        trainer.take_step(trainer.exmp_batch)
    trainer.train_step = fail_with("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        trainer.take_step(trainer.exmp_batch)


def test_a_cpu_reports_no_limit():
    assert memory_limit(jax.devices("cpu")[0]) is None
