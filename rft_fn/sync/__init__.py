"""Weight sync: sends the trained weights from a strategy to an engine, one full tensor at a time.

`push` works for every strategy and every engine. Three guards are on the way, because weights that did not
arrive change nothing that a loss or a reward shows:

1. the manifest (`manifest_of`): each tensor is compared with the trainer's own module before it is sent;
2. the load check (rft_fn.engine.weight_folder): the engine counts what its model took;
3. the canary: weights with fresh noise, so that an old weight in the engine is seen in its log-probs.
"""

from rft_fn.sync.canary import CanaryError, Probe, canary, with_noise
from rft_fn.sync.push import CheckedWeights, Expected, ManifestError, manifest_of, push

__all__ = ["canary", "push"]
