"""``tpkernels serve``: the OpenAI HTTP API for a model on several ranks.

Rank 0 serves HTTP. The continuous batching of transformers generates on all ranks.

- `server`: the process that starts and watches the ranks, and the function that each rank runs.
- `app`: the HTTP routes. `api`: requests and replies.
- `batcher`: adds requests to the transformers manager and receives its tokens.
- `choices`: samples the tokens of a batch and computes log-probabilities, within the step of
  transformers.
"""
