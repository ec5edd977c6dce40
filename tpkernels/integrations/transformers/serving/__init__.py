"""``tpkernels serve``: OpenAI's HTTP interface to a model on several ranks.

Rank 0 speaks HTTP; transformers' continuous batching generates on all ranks.

- `server`: the process that starts the ranks and watches them, and what each rank runs.
- `app`: the HTTP routes. `api`: what clients send and get.
- `batcher`: requests into transformers' manager, tokens out of it.
- `choices`: the tokens of a batch and their log-probabilities, within transformers' step.
"""
