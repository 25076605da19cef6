"""Page stores, handle tensors and the launching of kernels."""

# Whoever imports the runtime can load handles with torch.load(weights_only=True).
from kvcompile.runtime import pickling as pickling
