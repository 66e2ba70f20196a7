"""Planners of other systems under the same protocol as ours, for fair comparison.

| name | file | homes | copies | split |
|---|---|---|---|---|
| static | longest_first | as they are | none | |
| lpt | longest_first | longest first, batch total | none | |
| eplb-history, eplb-oracle | eplb | packed from loads | for the whole step | equal |
| lplb | lplb | longest first | for the whole step, on a fixed graph | min-max, exact |
| ultraep | online | as they are | per micro-batch, inside a node | quotas |
| llep | online | as they are | per micro-batch, anywhere, no slot limit | chunks |
| balanced | online | as they are | as many as it takes, anywhere | equal ranks |

They are written from public descriptions of the methods, not from code. Like the originals, they take micro-batches as
given and ignore what copies and moves cost.
"""

from equilibra.plan.baselines.eplb import Eplb, eplb_replicas
from equilibra.plan.baselines.longest_first import LongestFirst, Static
from equilibra.plan.baselines.lplb import Lplb
from equilibra.plan.baselines.online import Balanced, LeastLoaded, UltraEP

__all__ = ["Balanced", "Eplb", "LeastLoaded", "LongestFirst", "Lplb", "Static", "UltraEP", "eplb_replicas"]
