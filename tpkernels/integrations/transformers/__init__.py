"""Generation and serving of transformers models on several ranks. transformers generates, batches
and samples. This package loads the model on each rank and distributes tokens and text."""
