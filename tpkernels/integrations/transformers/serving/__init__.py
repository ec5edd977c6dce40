"""``tpkernels serve``: OpenAI's HTTP interface to a model on several ranks.

Rank 0 speaks HTTP; transformers' continuous batching generates on all ranks.

- `requests`: what clients may send. `replies`: what they get, errors included.
- `app`: the HTTP routes. `guard`: what holds for every request: key, size of the body, counting.
- `batcher`: requests into transformers' manager, tokens out of it.
- `outputs`: where the manager puts its outputs.
- `sampling`: temperature, top-k and top-p of each request of a batch.
- `rank`: what each rank runs. `host`: the process that starts the ranks and watches them.
"""
