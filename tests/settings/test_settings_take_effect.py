"""Every field of every config changes what is built from it, or is refused by its name."""

import functools
import inspect
import json
import os
import subprocess
import sys

import pytest
from processes import TESTS
from settings.observe import CASES
from test_architecture import config_classes, declared_fields

pytestmark = pytest.mark.slow

WITHOUT_CASE = {
    "DataConfig.data_config_type": "is read before there is a config: it chooses the class",
    "TextDataConfig.worker_count": "changes speed alone, see tests/dataset/background/test_workers.py",
    "TextDataConfig.worker_buffer_size": "changes speed alone, see tests/dataset/background/test_prefetch.py",
    "PrepareConfig.num_workers": "changes speed alone, see tests/dataset/prepare/test_api.py",
    "RunConfig.name": "names the folder, which Hydra makes of the same setting before there is a config",
    "BadStepConfig.max_rollbacks": "needs rollbacks, see tests/trainer/base/test_guard.py",
    "BadStepConfig.max_skipped_share": "needs skipped steps, see tests/trainer/base/test_guard.py",
}
"""Fields whose effect is not observed here, and why."""


def covered_fields() -> set[str]:
    """The fields that have a case, under the classes that declare them."""
    return {
        f"{owner.__name__}.{case.field}"
        for case in CASES
        for owner in inspect.getmro(case.config_class)
        if case.field in vars(owner).get("__annotations__", {})
    }


@functools.cache
def observed() -> dict:
    """Observe all settings in a process of its own."""
    flags = os.environ["XLA_FLAGS"]
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(map(str, [TESTS.parent, TESTS]))}
    command = [sys.executable, "-m", "settings.observe"]
    result = subprocess.run(
        command, env=environment, cwd=TESTS, capture_output=True, text=True, timeout=600, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_every_field_of_every_config_has_a_case_or_a_reason():
    declared = {f"{config.name}.{field}" for config in config_classes() for field in declared_fields(config)}
    assert declared - covered_fields() == set(WITHOUT_CASE)


def test_every_changed_field_has_an_effect_or_is_an_error_that_names_it():
    assert observed()["problems"] == {}


def test_a_config_that_is_not_changed_is_observed_to_be_the_same():
    assert observed()["unsteady"] == []
