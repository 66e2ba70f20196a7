"""What others do, under the same protocol as our planner, so that figures compare like with like.

| name | file | homes | copies | split |
|---|---|---|---|---|
| static | longest_first | as they are | none | |
| lpt | longest_first | longest first, batch total | none | |
| eplb-history, eplb-oracle | eplb | packed from loads | for the whole step | equal |
| lplb | lplb | longest first | for the whole step, on a fixed graph | min-max, exact |
| ultraep | ultraep | as they are | per micro-batch, inside a node | quotas |
| llep | least_loaded | as they are | per micro-batch, anywhere, no slot limit | chunks |
| balanced | balanced | as they are | as many as it takes, anywhere | equal ranks |

They are written from the public descriptions of the methods, not from anybody's code. Like the systems they stand
for, they take the micro-batches as given and do not weigh what copies and moves cost.
"""

from equilibra.plan.baselines.balanced import Balanced
from equilibra.plan.baselines.eplb import Eplb, eplb_replicas
from equilibra.plan.baselines.least_loaded import LeastLoaded
from equilibra.plan.baselines.longest_first import LongestFirst, Static
from equilibra.plan.baselines.lplb import Lplb
from equilibra.plan.baselines.ultraep import UltraEP

__all__ = ["Balanced", "Eplb", "LeastLoaded", "LongestFirst", "Lplb", "Static", "UltraEP", "eplb_replicas"]
