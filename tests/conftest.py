"""Fixtures for every test."""

from tests.brokers import kafka, run_name, settings

__all__ = ["kafka", "run_name", "settings"]
