"""A rollout engine that keeps attention and experts in different processes and shuttles micro-batches between them."""

from equilibra.rollout.pool import Pool
from equilibra.rollout.setting import PoolModel, PoolSetting, Statistics

__all__ = ["Pool", "PoolModel", "PoolSetting", "Statistics"]
