"""Generation and serving with models of transformers on several ranks: loading the model on each
rank, choosing tokens, and moving tokens and text. transformers batches the requests of a server."""
