"""Generation and serving with models of transformers on several ranks. transformers generates,
batches and samples; what is here loads the model on each rank and moves tokens and text."""
