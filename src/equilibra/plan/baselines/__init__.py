"""Planners of other systems under the same protocol as ours, for fair comparison.

| name | homes | copies | split |
|---|---|---|---|
| static | as they are | none | |
| lpt | longest first, by the batch total | none | |
| eplb-history, eplb-oracle | packed by loads | for the whole step | equal |
| lplb | longest first | for the whole step, on a fixed graph | min-max, exact |
| ultraep | as they are | per micro-batch, inside a node | quotas |
| llep | as they are | per micro-batch, anywhere, no slot limit | chunks |
| balanced | as they are | as many as it takes, anywhere | equal ranks |

The first four are in `fixed`, the others in `online`. They are written from public descriptions of the methods, not
from code. Like the originals, they take micro-batches as given and ignore what copies and moves cost.
"""

from equilibra.plan.baselines.fixed import Eplb, LongestFirst, Lplb, Static, eplb_replicas
from equilibra.plan.baselines.online import Balanced, LeastLoaded, UltraEP

__all__ = ["Balanced", "Eplb", "LeastLoaded", "LongestFirst", "Lplb", "Static", "UltraEP", "eplb_replicas"]
