"""One supervisor for all tests of ranks as processes, and one small model."""

from tests.helpers.rank_fixtures import rank_model, supervisor

__all__ = ["rank_model", "supervisor"]
