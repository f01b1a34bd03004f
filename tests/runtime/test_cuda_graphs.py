"""Calls of converted models that are replayed from CUDA graphs: right whatever changes, and never in the way."""

import copy
import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from kfconvert import ModelConverter
from kfconvert.runtime.recording import program
from kfconvert.runtime.recording.cuda_graphs import MOST_RECORDINGS

pytestmark = pytest.mark.cuda


class Net(nn.Module):
    def __init__(self, width=64, repeats=False):
        super().__init__()
        self.repeats = repeats
        self.first, self.norm, self.second = nn.Linear(width, 256), nn.LayerNorm(256), nn.Linear(256, width)
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, x):
        y = torch.relu(self.second(self.norm(torch.nn.functional.gelu(self.first(x))))) * self.scale
        return self.first(y) if self.repeats else y


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def net(monkeypatch, request):
    monkeypatch.setattr(program, "LEAST_BYTES", 0)
    return Net(repeats=request.param)


def converted(model=None, width=64, **options):
    torch.manual_seed(0)
    model = (model or Net(width)).cuda().eval()
    converter = ModelConverter(select="all", cuda_graphs=options.pop("cuda_graphs", True), **options)
    return model, converter.convert_model(model, example_inputs=torch.randn(4, width, device="cuda"))


def inputs(rows=4, width=64, seed=0):
    return torch.randn(rows, width, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def assert_replayed(original, fused, x, calls=3):
    """The outputs are those of the original, in the last call from a recording."""
    with torch.no_grad():
        for index in range(calls):
            before = fused.kfconvert_info()["cuda_graphs"]["replayed"]
            y = x + index
            torch.testing.assert_close(fused(y), original(y), atol=1e-4, rtol=1e-4)
    assert fused.kfconvert_info()["cuda_graphs"]["replayed"] == before + 1


def test_a_kind_of_call_is_recorded_when_it_comes_again():
    original, fused = converted()
    assert fused.kfconvert_info()["cuda_graphs"]["recordings"] == 1  # that of the example
    assert_replayed(original, fused, inputs(4), calls=1)
    with torch.no_grad():
        fused(inputs(7))
        assert fused.kfconvert_info()["cuda_graphs"]["recordings"] == 1
        fused(inputs(7))
        assert fused.kfconvert_info()["cuda_graphs"]["recordings"] == 2
    assert_replayed(original, fused, inputs(7), calls=1)
    info = fused.kfconvert_info()["cuda_graphs"]
    assert info["replayed"] == 2 and info["launched"] == 2 and not info["refused"]


def test_outputs_are_the_callers_own(net):
    original, fused = converted(net)
    x = inputs()
    with torch.no_grad():
        first = fused(x)
        kept = first.clone()
        second = fused(-x)
        assert torch.equal(first, kept) and first.data_ptr() != second.data_ptr()
        first.zero_()
        torch.testing.assert_close(fused(x), original(x), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_large_output_is_not_in_the_memory_of_the_recording():
    original, fused = converted(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 50257)))
    xs = [inputs(128, seed=seed) for seed in range(6)]
    for x, output in zip(xs, [fused(x) for x in xs]):
        torch.testing.assert_close(output, original(x), atol=1e-4, rtol=1e-4)
    info = fused.kfconvert_info()["cuda_graphs"]
    assert info["replayed"] == 4 and info["bytes"] < program.LEAST_BYTES
    for model in (original, fused):
        model[1].weight, model[1].bias = nn.Parameter(model[1].weight[:100].clone()), None
    torch.testing.assert_close(fused(x), original(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.second.weight.data.copy_(m.second.weight * 3),
        lambda m: m.second.weight.detach().mul_(3),
        lambda m: m.scale.mul_(3),
        lambda m: setattr(m, "scale", m.scale * 3),
        lambda m: setattr(m.second, "weight", nn.Parameter(m.second.weight.detach() * 3)),
        lambda m: m.load_state_dict({k: v * 3 for k, v in m.state_dict().items()}),
        lambda m: nn.init.constant_(m.norm.weight, 3),
        lambda m: m.cpu() and m.cuda(),
        lambda m: setattr(m.norm, "eps", 3.0),
    ],
)
def test_changes_between_replays_are_seen(net, change):
    original, fused = converted(net)
    assert_replayed(original, fused, inputs())
    with torch.no_grad():
        for model in (original, fused):
            change(model)
    fused.kfconvert_refresh()
    x = inputs(seed=1)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fused(x), original(x), atol=1e-4, rtol=1e-4)


def test_workspaces_that_others_clear_are_still_there():
    """torch.compile clears those of cuBLAS and cuBLASLt. A pool that comes after another takes over its stream, and was
    left with workspaces in the memory of the first."""
    converted()
    gc.collect()
    original, fused = converted(width=512)
    assert_replayed(original, fused, inputs(width=512))
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
    assert_replayed(original, fused, inputs(width=512))
    assert all(bool(each.isnan().all()) for each in others)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.net = nn.Embedding(10, 64), Net()

    def forward(self, ids):
        return self.net(self.table(ids))


@pytest.mark.parametrize("way", ["data", "parameter", "module"])
def test_a_larger_table_takes_new_ids(way):
    """The replay that is launched before the weights were looked at must not look up rows that were not there."""
    torch.manual_seed(0)
    original = Words().cuda().eval()
    converter = ModelConverter(select="all", cuda_graphs=True)
    fused = converter.convert_model(original, example_inputs=torch.arange(10, device="cuda"))
    larger = torch.randn(1000, 64, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            fused(torch.arange(10, device="cuda"))
        for model in (original, fused):
            if way == "data":
                model.table.weight.data = larger
            elif way == "parameter":
                model.table.weight = nn.Parameter(larger)
            else:
                model.table = nn.Embedding.from_pretrained(larger)
        ids = torch.arange(990, 1000, device="cuda")
        torch.testing.assert_close(fused(ids), original(ids), atol=1e-4, rtol=1e-4)
    torch.cuda.synchronize()


def test_modes_hooks_and_training_after_replays(net):
    original, fused = converted(net)
    x = inputs()
    assert_replayed(original, fused, x)
    seen = []
    handle = fused.second.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        torch.testing.assert_close(fused(x), original(x), atol=1e-4, rtol=1e-4)
    assert seen == [1]
    handle.remove()
    assert_replayed(original, fused, x)
    with torch.no_grad(), torch.autocast("cuda"):
        assert fused(x).dtype is original(x).dtype
    assert_replayed(original, fused, x)
    with torch.no_grad():
        assert torch.equal(fused.train()(x), original.train()(x))
    fused.eval(), original.eval()
    assert_replayed(original, fused, x)
    with torch.no_grad():
        vectorised = torch.func.vmap(fused)(x)
    torch.testing.assert_close(vectorised, original(x), atol=1e-4, rtol=1e-4)


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.factor = torch.tensor(2.0)  # no buffer: it stays on the CPU

    def forward(self, x):
        return super().forward(x) * self.factor


def test_a_number_in_the_memory_of_the_host_is_read_anew():
    original, fused = converted(Scaled())
    assert_replayed(original, fused, inputs())
    for model in (original, fused):
        model.factor.fill_(5.0)
    with torch.no_grad():
        torch.testing.assert_close(fused(inputs()), original(inputs()), atol=1e-4, rtol=1e-4)
    assert_replayed(original, fused, inputs())


def test_steps_of_an_optimizer_between_replays_are_seen():
    original, fused = converted()
    for _ in range(3):
        assert_replayed(original, fused, inputs())
        for model in (original, fused):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            model.train()(inputs(seed=2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
    assert_replayed(original, fused, inputs())


def test_gradients_are_those_of_the_original_and_nothing_is_recorded_for_them():
    original, fused = converted()
    before = fused.kfconvert_info()["cuda_graphs"]
    found = []
    for model in (original, fused):
        x = inputs().requires_grad_()
        model(x).sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert fused.kfconvert_info()["cuda_graphs"] == before


def test_inference_mode_and_no_grad_take_turns(net):
    original, fused = converted(net)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        for _ in range(3):
            with mode():
                out = fused(inputs())
                torch.testing.assert_close(out, original(inputs()), atol=1e-4, rtol=1e-4)
                assert out.is_inference() is (mode is torch.inference_mode)
    assert fused.kfconvert_info()["cuda_graphs"]["replayed"] == 9


def test_switches_of_libraries_have_recordings_of_their_own():
    original, fused = converted(Net(512), 512)
    x = inputs(64, 512)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("tf32", "ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            with torch.no_grad():
                expected = fused.kfconvert_info()["cuda_graphs"]
                outs = [fused(x) for _ in range(3)]
                exact = original.double()(x.double())
                original.float()
                error = ((outs[-1] - exact).abs().max() / exact.abs().max()).item()
                assert error < 1e-6 if precision == "ieee" else error > 1e-6, (precision, error, expected)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert fused.kfconvert_info()["cuda_graphs"]["recordings"] >= 3


def test_no_more_recordings_than_allowed_and_lengths_in_random_order_do_not_push_each_other_out():
    original, fused = converted()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(40):
            for rows in torch.randperm(2 * MOST_RECORDINGS, generator=generator).tolist():
                x = inputs(rows + 1)
                torch.testing.assert_close(fused(x), original(x), atol=1e-4, rtol=1e-4)
    info = fused.kfconvert_info()["cuda_graphs"]
    assert info["recordings"] == MOST_RECORDINGS
    assert info["replayed"] > 0.4 * (info["replayed"] + info["launched"])


def test_a_length_that_comes_most_often_gets_one_of_the_chosen_number_of_recordings():
    original, fused = converted(max_recordings=2)
    with torch.no_grad():
        for rows in range(1, 6):
            for _ in range(3):
                torch.testing.assert_close(fused(inputs(rows)), original(inputs(rows)), atol=1e-4, rtol=1e-4)
        for _ in range(30):
            fused(inputs(100))
    assert_replayed(original, fused, inputs(100), calls=1)
    assert fused.kfconvert_info()["cuda_graphs"]["recordings"] == 2


def test_threads_and_streams(net):
    original, fused = converted(net)
    xs = [inputs(1 + seed % 5, seed=seed) for seed in range(10)]
    with torch.no_grad():
        expected = [original(x) for x in xs]
    torch.cuda.synchronize()

    def work(index):
        stream = torch.cuda.Stream() if index % 2 else torch.cuda.default_stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for turn in range(100):
                which = (turn * 7 + index) % 10
                torch.testing.assert_close(fused(xs[which]), expected[which], atol=1e-4, rtol=1e-4)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert fused.kfconvert_info()["cuda_graphs"]["replayed"] > 500


def test_other_threads_draw_random_numbers_and_allocate_while_calls_are_recorded():
    original, fused = converted()
    stop, failures = threading.Event(), []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stop.is_set():
                try:
                    x = torch.randn(1 << 20, device="cuda")
                    assert torch.nn.functional.dropout(x).isfinite().all()
                except Exception as error:
                    failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        for rows in range(1, MOST_RECORDINGS):
            for _ in range(3):
                x = inputs(rows)
                torch.testing.assert_close(fused(x), original(x), atol=1e-4, rtol=1e-4)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert fused.kfconvert_info()["cuda_graphs"]["recordings"] >= MOST_RECORDINGS - 1


def test_two_models_on_two_streams():
    """Their recordings have nothing in common, workspaces of libraries included."""
    pairs = [converted(Net(512), 512) for _ in range(2)]
    x = inputs(64, 512)
    with torch.no_grad():
        expected = [original(x) for original, _ in pairs]
        for _, fused in pairs:
            for _ in range(3):
                fused(x)
        streams = [torch.cuda.Stream() for _ in pairs]
        torch.cuda.synchronize()
        for _ in range(50):
            outs = []
            for (_, fused), stream in zip(pairs, streams):
                with torch.cuda.stream(stream):
                    outs.append([fused(x) for _ in range(5)])
            torch.cuda.synchronize()
            for out, wanted in zip(outs, expected):
                for each in out:
                    torch.testing.assert_close(each, wanted, atol=1e-4, rtol=1e-4)


def test_within_another_capture_the_program_is_captured_as_it_is():
    original, fused = converted()
    x = inputs()
    with torch.no_grad():
        fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused(x)
        x.mul_(2)
        graph.replay()
        torch.testing.assert_close(out, original(x), atol=1e-4, rtol=1e-4)


class Synchronises(Net):
    def forward(self, x):
        scale = torch.tensor([2.0] * 64).to(x.device)  # a copy that the host waits for
        return super().forward(x) * scale


def test_a_call_that_cannot_be_recorded_runs_and_warns_once():
    x = inputs(5)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        original, fused = converted(Synchronises(), cuda_graphs=True)
        for index in range(6):
            torch.testing.assert_close(fused(x + index), original(x + index), atol=1e-4, rtol=1e-4)
    info = fused.kfconvert_info()["cuda_graphs"]
    if info["refused"]:
        assert sum("CUDA graph" in str(each.message) for each in caught) == 1
        assert info["recordings"] == 0


def test_a_failed_recording_leaves_the_process_as_it_was():
    from kfconvert.runtime.recording.recording import Pool, Recording, Unrecordable

    pool = Pool(torch.device("cuda", 0))
    x = inputs()
    for call in (
        lambda leaves: [leaves[0] * leaves[0].sum().item()],
        lambda leaves: [torch.rand_like(leaves[0]).cpu()],
    ):
        with pytest.raises(Unrecordable):
            Recording(call, [x], [], pool)
        assert torch.rand(3, device="cuda").sum() > 0
    before = torch.cuda.memory_reserved()
    block = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    recording = Recording(lambda leaves: [leaves[0] + 1], [x], [], pool)
    assert torch.equal(recording.replay([x])[0], x + 1)


def test_a_pool_is_made_in_a_thread_that_has_not_used_cuda_before():
    from kfconvert.runtime.recording.recording import Pool

    with ThreadPoolExecutor(1) as thread:
        pools = [Pool(torch.device("cuda", 0)) for _ in range(8)]  # more than others have left
        pools += [thread.submit(Pool, torch.device("cuda", 0)).result() for _ in range(2)]
    assert len({pool.capture_stream.stream.cuda_stream for pool in pools}) == 10


def test_copies_record_for_themselves():
    original, fused = converted()
    assert_replayed(original, fused, inputs())
    duplicate = copy.deepcopy(fused)
    assert duplicate.kfconvert_info()["cuda_graphs"]["recordings"] == 0
    assert_replayed(original, duplicate, inputs())


def test_memory_goes_with_the_model():
    gc.collect()
    sizes = []
    for _ in range(5):
        original, fused = converted(Net(512), 512)
        with torch.no_grad():
            for rows in 3 * list(range(1, 10)):
                fused(inputs(rows, 512))
        del original, fused
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] <= sizes[0]


def test_weights_written_over_and_over_take_no_more_memory():
    original, fused = converted()
    sizes = []
    with torch.no_grad():
        for turn in range(12):
            fused.second.weight.add_(0.1)
            original.second.weight.add_(0.1)
            assert_replayed(original, fused, inputs())
            sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] == sizes[4]


def test_recordings_of_several_sizes_share_memory():
    """Their inputs and outputs do, too: a replay has copied its outputs before the next one overwrites them."""
    original, fused = converted(Net(512), 512)
    assert_replayed(original, fused, inputs(4096, 512))
    taken = fused.kfconvert_info()["cuda_graphs"]["bytes"]
    several = [inputs(rows, 512, seed=rows) for rows in range(2048, 2056)]
    with torch.no_grad():
        for _ in range(3):
            outputs = [fused(x) for x in several]
        for x, output in zip(several, outputs):
            torch.testing.assert_close(output, original(x), atol=1e-4, rtol=1e-4)
    info = fused.kfconvert_info()["cuda_graphs"]
    assert info["recordings"] == 10 and info["replayed"] >= 8 and info["bytes"] == taken


def test_auto_keeps_what_is_faster():
    torch.manual_seed(0)
    model = nn.Sequential(*[Net() for _ in range(6)]).cuda().eval()
    converter = ModelConverter(select="all")
    converter.convert_model(model, example_inputs=inputs())
    stats = converter.conversion_stats
    assert stats["cuda_graphs"]["enabled"]  # some 30 launches against one
    timings = stats["timings"]["timings"]
    assert timings["converted"]["median_ms"] < timings["without CUDA graphs"]["median_ms"]
    assert stats["speedup_achieved"] == stats["timings"]["speedups"]["converted"]["ratio"]


class Aliases(Net):
    def forward(self, x, mask=None):
        y = super().forward(x)
        return {"all": y, "first": y[:, :3], "given": x, "weight": self.scale, "number": 3}


def test_outputs_that_share_memory_are_not_recorded():
    original, fused = converted(Aliases())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for index in range(4):
            x = inputs() + index
            out = fused(x)
            assert out["given"] is x and out["number"] == 3
            assert out["first"].untyped_storage().data_ptr() == out["all"].untyped_storage().data_ptr()
            torch.testing.assert_close(out["all"], original(x)["all"], atol=1e-4, rtol=1e-4)


class Passes(Net):
    def forward(self, x):
        return {"all": super().forward(x), "given": x, "weight": self.scale, "transposed": (x * 2).t()}


def test_outputs_that_are_inputs_weights_or_laid_out_otherwise():
    original, fused = converted(Passes())
    with torch.no_grad():
        for index in range(5):
            x = inputs() + index
            ours, theirs = fused(x), original(x)
            assert ours["given"] is x and ours["weight"] is fused.scale
            assert ours["transposed"].stride() == theirs["transposed"].stride()
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert fused.kfconvert_info()["cuda_graphs"]["replayed"] >= 4


STRIDES = {
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(4, 64),
    "sliced": lambda x: torch.cat([x, x], 1)[:, :64],
}


@pytest.mark.parametrize("make", STRIDES.values(), ids=STRIDES)
def test_inputs_with_other_strides(make):
    original, fused = converted()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for index in range(4):
            x = make(inputs() + index)
            torch.testing.assert_close(fused(x), original(x), atol=1e-4, rtol=1e-4)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
    )


NETS = {"linear": (Net, (4, 64)), "convolution": (convolutions, (2, 3, 16, 16))}


@torch.no_grad()
def with_other_weights(name):
    """The original, converted, with weights that it has not run with yet; an input, and the output for that."""
    make, shape = NETS[name]
    torch.manual_seed(0)
    original, x = make().cuda().eval(), torch.randn(shape, device="cuda")
    fused = ModelConverter(select="all").convert_model(original, example_inputs=x)
    state = {
        name: torch.rand_like(value) if value.is_floating_point() else value
        for name, value in original.state_dict().items()
    }
    for each in (original, fused):
        each.load_state_dict(state)
    expected = original(x)
    torch.cuda.synchronize()
    return fused, x, expected


@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_what_one_stream_derives_is_finished_for_others(name):
    fused, x, expected = with_other_weights(name)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for index, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            if index == 0:
                torch.cuda._sleep(200_000_000)  # about a tenth of a second
            outputs.append(fused(x))
    torch.cuda.synchronize()
    for output in outputs:
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_what_is_derived_within_a_capture_is_not_kept(name):
    fused, x, expected = with_other_weights(name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused(x)
    torch.testing.assert_close(fused(x), expected, atol=1e-4, rtol=1e-4)  # the graph has not run yet
    graph.replay()
    torch.testing.assert_close(captured, expected, atol=1e-4, rtol=1e-4)
    assert not fused.kfconvert_info()["guard"]["misses"]


@torch.no_grad()
def test_static_outputs_are_those_of_the_recording():
    original, fused = converted(static_outputs=True)
    x = inputs()
    first = fused(x)
    kept = first.clone()
    torch.testing.assert_close(kept, original(x), atol=1e-4, rtol=1e-4)
    second = fused(-x)
    assert second.data_ptr() == first.data_ptr() and torch.equal(first, second) and not torch.equal(first, kept)
    other = [fused(inputs(9)) for _ in range(3)][-1]  # another recording, with memory of its own
    torch.testing.assert_close(second, original(-x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other, original(inputs(9)), atol=1e-4, rtol=1e-4)
    assert fused.kfconvert_info()["cuda_graphs"]["static_outputs"]


class Twice(nn.Module):
    """Values decide, so that parts are captured on their own; one runs twice in a call."""

    def __init__(self):
        super().__init__()
        self.part, self.last = Net(), Net()

    def forward(self, x):
        first = self.part(x)
        return first if first.abs().max() > 1e9 else self.last(first - self.part(-x))


@torch.no_grad()
def test_parts_are_recorded_each_and_their_outputs_are_never_static():
    original, fused = converted(Twice(), static_outputs=True)
    assert not fused.kfconvert_info()["regions"][0]["captured"]
    for index in range(4):
        x = inputs(seed=index)
        torch.testing.assert_close(fused(x), original(x), atol=1e-4, rtol=1e-4)
    info = fused.kfconvert_info()["cuda_graphs"]
    assert info["recordings"] == 2 and info["replayed"] >= 4
