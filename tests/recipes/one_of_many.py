"""Compiles the same programs as others do at the same time, with one cache for all: `one_of_many.py NUM_PROGRAMS`."""

import sys

import jax
import jax.numpy as jnp

from xlstm_jax.recipes import compilation_cache

jax.default_backend = lambda: "gpu"  # a cache is for GPUs only
events = {"/jax/compilation_cache/cache_hits": 0, "/jax/compilation_cache/cache_misses": 0}


def count(event, **kwargs):
    if event in events:
        events[event] += 1


jax.monitoring.register_event_listener(count)
compilation_cache.enable_compilation_cache()
x = jnp.arange(64.0)
for number in range(int(sys.argv[1])):
    result = jax.jit(lambda x, number=number: jnp.sort(jnp.sin(x) * number).sum())(x)
    expected = number * float(jnp.sin(x).sum())
    assert abs(float(result) - expected) < 1e-3 + 1e-4 * number
hits, writes = events.values()
sys.stdout.write(f"hits {hits} writes {writes}\n")
