"""Times of kernels: collected under the profiler, shown as a table."""

import jax
import jax.numpy as jnp

from xlstm_jax.utils.kernel_times import KernelTime, kernel_table, kernel_times


def test_the_kernels_that_take_longest_come_first_and_the_sum_is_that_of_all():
    times = [KernelTime("long", 0.003, 2), KernelTime("short", 0.001, 7), KernelTime("shorter", 0.0005, 1)]
    assert kernel_table(times, count=2).splitlines() == [
        "| of 4.500 ms in kernels | ms | calls |",
        "|---|---|---|",
        "| long | 3.000 | 2 |",
        "| short | 1.000 | 7 |",
    ]


def test_a_program_runs_once_and_has_kernels_on_gpus_only():
    double, runs = jax.jit(lambda x: 2 * x), []

    def program():
        runs.append(double(jnp.ones(3)))
        return runs[-1]

    assert bool(kernel_times(program)) == (jax.default_backend() == "gpu")
    assert len(runs) == 1
