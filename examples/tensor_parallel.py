"""A language model whose layers are divided among several processes, converted by each of them.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [--small] [--device cuda]

You learn that a model of transformers is divided first (tp_plan="auto") and converted then, on each rank: the program
has the rank's shards for weights, fuses what lies between the collectives, and calls these in the original's order. A
rank converts without waiting for the others, so what is measured, and fused, may differ among them; answers do not.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from shared import converted, options_of


def saved_model(path, small):
    """Saves a LLaMA with random weights, as a checkpoint that all ranks read."""
    import transformers

    torch.manual_seed(0)
    width, layers, words = (64, 2, 128) if small else (1024, 8, 8000)
    heads = {"num_attention_heads": width // 16, "num_key_value_heads": width // 32}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": words}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, pad_token_id=0)).save_pretrained(path)


def main(argv=None):
    options = options_of(__doc__).parse_args(argv)
    if "RANK" not in os.environ:
        raise SystemExit("torchrun starts the processes: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = torch.device(options.device).type
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        place = [tempfile.mkdtemp()]
        dist.broadcast_object_list(place)
        if rank == 0:
            saved_model(place[0], options.small)
        dist.barrier()
        divided = transformers.distributed.DistributedConfig(tp_plan="auto")
        model = transformers.AutoModelForCausalLM.from_pretrained(place[0], distributed_config=divided).eval()
        whole = transformers.AutoModelForCausalLM.from_pretrained(place[0]).to(device).eval()
        ids = torch.randint(1, whole.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)

        # With the usual effort the calls are captured as well that generate() makes.
        fused = converted(f"rank {rank}", model, {"input_ids": ids}, options.small, effort="full")
        with torch.no_grad():
            difference = (fused(input_ids=ids).logits - whole(input_ids=ids).logits).abs().max().item()
            texts = [
                each.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
                for each in (fused, whole)
            ]
        guard = fused.kfconvert_info()["guard"]
        print(f"rank {rank}: off by {difference:.1e} from the whole model, the same text: {torch.equal(*texts)}")
        print(f"rank {rank}: {guard['hits']} calls of the program, {sum(guard['misses'].values())} misses", flush=True)
        dist.barrier()
        return 0 if difference < 1e-3 and guard["hits"] and not guard["misses"] else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
