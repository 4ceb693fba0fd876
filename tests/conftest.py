"""Fixtures for every test."""

from hypothesis import settings as hypothesis_settings

from tests.brokers import kafka, run_name, settings
from tests.engines import make_model, tiny_model_dir, vllm_engine
from tests.played_trainer import cluster, config
from tests.schema_registry import registry
from tests.secured_broker import secured

__all__ = [
    "cluster",
    "config",
    "kafka",
    "make_model",
    "registry",
    "run_name",
    "secured",
    "settings",
    "tiny_model_dir",
    "vllm_engine",
]

# The same examples every time, so that a failure is the change's. New examples are looked for with
# pytest --hypothesis-profile=default.
hypothesis_settings.register_profile("repeatable", derandomize=True)
hypothesis_settings.load_profile("repeatable")
