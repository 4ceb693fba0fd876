"""Fixtures for every test."""

from tests.brokers import kafka, run_name, settings
from tests.engines import make_model, tiny_model_dir, vllm_engine
from tests.played_trainer import cluster, config

__all__ = [
    "cluster",
    "config",
    "kafka",
    "make_model",
    "run_name",
    "settings",
    "tiny_model_dir",
    "vllm_engine",
]
