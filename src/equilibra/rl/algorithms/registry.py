"""The algorithms we ship, by name: importing this file registers them. `algorithm_named` does so."""

from equilibra.rl.algorithms.algorithm import register
from equilibra.rl.algorithms.grpo import Grpo
from equilibra.rl.algorithms.gspo import Gspo
from equilibra.rl.algorithms.ppo import Ppo
from equilibra.rl.algorithms.tppo import Tppo

__all__: list[str] = []

register("grpo", Grpo)
register("gspo", Gspo)
register("ppo", Ppo)
register("tppo", Tppo)
