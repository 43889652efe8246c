"""lm-eval uses no network, and caches requests in the folder of a test."""

import pytest


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Keep data sets and caches of requests in a folder of the test, and the network out of it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path / "requests"))
