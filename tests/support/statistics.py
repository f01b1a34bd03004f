"""``conversion_stats`` of imaginary conversions, as an artifact stores them, and such as somebody means harm with."""

import copy


def error(leaf: str, max_rel: float | None) -> dict:
    return {"leaf": leaf, "scale": 1.0, "max_abs": max_rel, "mean_abs": max_rel,
            "max_rel": max_rel, "mean_rel": max_rel}  # fmt: skip


def site(module: str, pattern: str, original_us=None, fused_us=None, reason=None) -> dict:
    """One that is applied, unless there is a ``reason``."""
    status = "applied" if reason is None else "rejected"
    return {"pattern": pattern, "module": module, "region": "", "status": status, "reason": reason,
            "strategy": "kernel" if reason is None else None, "original_us": original_us, "fused_us": fused_us,
            "numerics": "exact"}  # fmt: skip


def timing(median: float) -> dict:
    return {"median_ms": median, "q1_ms": 0.95 * median, "q3_ms": 1.05 * median, "rounds": 80}


def timings(before: float, after: float) -> dict:
    ratio = before / after
    speedup = {"ratio": ratio, "q1": ratio, "q3": ratio, "low": 0.98 * ratio, "high": 1.02 * ratio, "measurable": True}
    return {
        "baseline": "original",
        "timings": {"original": timing(before), "converted": timing(after)},
        "speedups": {"converted": speedup},
    }


def statistics(layers: int = 3) -> dict:
    """Of a language model that got faster, with some of each kind of thing that there is to tell."""
    sites = [site("embeddings.norm", "add_layer_norm", 9.6, 9.3)]
    for layer in range(layers):
        at = f"encoder.layer.{layer}"
        slower = f"not faster: kernel takes 2{layer}.2 us, the original 18.3 us"
        sites += [
            site(f"{at}.attention.query", "merged_linear", 50.0, 40.0),
            site(f"{at}.attention.output", "linear", 18.3, 21.2, slower),
            site(f"{at}.intermediate", "linear_gelu", 92.0, 87.0),
            site(f"{at}.output", "linear", 70.0, 60.0),
        ]
    sites.append(site("pooler", "linear_tanh", reason="error 2.1e-03 against float64, allowed 9.8e-04"))
    applied = sum(each["status"] == "applied" for each in sites)
    original, converted = error(".hidden", 1.8e-7), error(".hidden", 2.6e-7)
    return {
        "total_found": len(sites),
        "total_replaced": applied,
        "speedup_achieved": 1.3,
        "sites": sites,
        "form_sites": [sites[:2]],
        "part_sites": [sites[1]],
        "near_misses": [{"pattern": "linear_relu", "module": "head", "reason": "its value goes to aten.elu",
                         "location": "net.py:31"}],
        "regions": [
            {"name": "input_ids=int64[1, 64]", "module": "", "captured": True, "reason": None, "location": None},
            {"name": "mask", "module": "", "captured": False, "reason": "its values decide", "location": "net.py:9"},
        ],
        "parts_left_out": 0,
        "accuracy": {
            "passed": True, "reason": None, "reference": "float64 run of the original", "original_error": original,
            "optimized_error": converted, "ratio": 1.44, "accuracy_threshold": 1e-6, "differing": 2,
            "outputs": [{"original_error": original, "optimized_error": converted},
                        {"original_error": error(".pooled", 1e-7), "optimized_error": error(".pooled", None)}],
        },
        "timings": timings(1.9, 1.46),
        "tuned_for": [{"inputs": "int64[32, 64]", "weight": 0.2, "timings": timings(40.0, 30.0)}],
        "generation": {
            "prompt": [1, 32], "new_tokens": 64, "speedup": timings(1.3, 1.0)["speedups"]["converted"],
            "original": {"tokens_per_s": 200.0, "prefill_ms": 9.0, "step_ms": 5.0},
            "converted": {"tokens_per_s": 260.0, "prefill_ms": 8.0, "step_ms": 4.0},
        },
        "seconds": {"trace": 1.74, "select": 0.078, "time": 0.25},
        "remembered": 0,
        "environment": {"torch": "2.14", "kfconvert": "0.1.0", "python": "3.11", "device": "a CPU", "threads": 1,
                        "dtype": "float32", "extension": True},
        "model": "LanguageModel",
        "config": {"select": "measured", "effort": "full", "exclude": ["conv*"], "cuda_graphs": "auto"},
        "inputs": "input_ids=int64[1, 64]",
        "cuda_graphs": {"enabled": True, "max_recordings": 16, "recordings": 1, "bytes": 2**21, "refused": {}},
        "memory": {"weights": 3 * 2**20, "derived": 2**20, "allowed": 2**21, "recordings": 2**21,
                   "peak": {"original": 360448, "converted": 197504}},
        "not_written": [],
        "layout": "contiguous",
        "reverted": None,
        "nothing_fused": None,
        "given_back": None,
        "replays_unfused": False,
    }  # fmt: skip


def given_back() -> dict:
    """Of a model that was converted, was not accurate, and was given back."""
    stats = statistics()
    reason = "output.hidden has error 3.0e-01 of its scale against the float64 run of the original"
    for each in stats["sites"]:
        each.update(status="rejected", reason=f"dropped after validation: {reason}", strategy=None)
    stats["accuracy"] |= {"passed": False, "reason": reason, "ratio": None}
    return stats | {"total_replaced": 0, "reverted": reason, "nothing_fused": reason, "given_back": reason,
                    "timings": None, "generation": None,
                    "tuned_for": [], "speedup_achieved": None}  # fmt: skip


def nothing_found() -> dict:
    """Of a model in which nothing could be fused, and nothing was measured."""
    why = "none of its calls starts a pattern"
    return statistics() | {
        "total_found": 0, "total_replaced": 0, "sites": [], "form_sites": [], "part_sites": [], "near_misses": [],
        "regions": [], "accuracy": None, "timings": None, "tuned_for": [], "generation": None, "seconds": {},
        "memory": None, "cuda_graphs": None, "nothing_fused": why, "given_back": why,
    }  # fmt: skip


def old() -> dict:
    """As the first versions told them: without distributions, outputs, memory and options."""
    stats = statistics()
    for timing in stats["timings"]["timings"].values():
        del timing["rounds"]
    for key in ("outputs", "differing", "accuracy_threshold"):
        del stats["accuracy"][key]
    for key in (
        "tuned_for",
        "memory",
        "config",
        "cuda_graphs",
        "part_sites",
        "form_sites",
        "parts_left_out",
        "not_written",
        "given_back",
        "replays_unfused",
    ):
        del stats[key]  # fmt: skip
    return stats


KINDS = {"usual": statistics, "given back": given_back, "nothing found": nothing_found, "old": old}


def with_texts(value, text: str):
    """``value`` with ``text`` in the place of every text in it but those that choose among a few words."""
    if isinstance(value, dict):
        kept = ("status", "layout", "baseline", "select", "effort", "cuda_graphs")
        return {key: copy.copy(v) if key in kept else with_texts(v, text) for key, v in value.items()}
    if isinstance(value, list):
        return [with_texts(each, text) for each in value]
    return text if isinstance(value, str) else value
