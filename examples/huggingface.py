"""A Llama model of transformers, tensor-parallel with one line of code.

Compares logits and generated tokens with a single process, and computes a gradient.

    torchrun --standalone --nproc-per-node 2 examples/huggingface.py
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import tpkernels


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # identical weights on all ranks, as from_pretrained loads
    single = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=72,
            num_hidden_layers=2,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=192,
            vocab_size=512,
        )
    )
    model = tpkernels.parallelize(copy.deepcopy(single), mesh)

    ids = torch.randint(0, 512, (2, 33))
    with torch.no_grad():
        difference = (model(ids).logits - single(ids).logits).abs().max().item()
    model(ids, labels=ids).loss.backward()
    generated = model.generate(ids[:, :5], max_new_tokens=8, do_sample=False)
    same = torch.equal(generated, single.generate(ids[:, :5], max_new_tokens=8, do_sample=False))
    if dist.get_rank() == 0:
        local = sum(p.numel() for p in model.parameters())
        print(f"{local:,} of {sum(p.numel() for p in single.parameters()):,} parameters per rank")
        print(f"logits differ by at most {difference:.1e}; generated the same tokens: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
