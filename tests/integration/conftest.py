"""Fixtures of tests that need Kafka. Those of the scope `session` exist once in each job."""

from tests.brokers import kafka, run_name, settings
from tests.engines import make_model, tiny_model_dir, vllm_engine
from tests.exports import exported
from tests.played_trainer import cluster, config
from tests.schema_registry import registry
from tests.secured_broker import secured
from tests.secured_run import secured_run
from tests.small_run import small, small_model
from tests.training_world import model, trained, world
from tests.written_run import written

__all__ = [
    "cluster",
    "config",
    "exported",
    "kafka",
    "make_model",
    "model",
    "registry",
    "run_name",
    "secured",
    "secured_run",
    "settings",
    "small",
    "small_model",
    "tiny_model_dir",
    "trained",
    "vllm_engine",
    "world",
    "written",
]
