"""The planners we ship, by name: importing this file registers them. `planner_names` and `planner_named` do so."""

from equilibra.plan.baselines import Balanced, Eplb, LeastLoaded, LongestFirst, Lplb, Static, UltraEP
from equilibra.plan.planner import register
from equilibra.plan.step import Equilibra

register("static", Static)
register("eplb-history", Eplb.from_history)
register("eplb-oracle", Eplb)
register("lpt", LongestFirst)
register("lplb", Lplb)
register("ultraep", UltraEP)
register("llep", LeastLoaded)
register("balanced", Balanced)
register("equilibra", Equilibra)
