"""What a training loop may do with a model of ``training=True``: losses, parameters and buffers are the original's."""

import copy

import accelerate
import peft
import pytest
import torch
import transformers
from support.selection import exhaustive
from support.small_models import guard
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kfconvert import zoo
from kfconvert.conversion import leave_as_it_is

CLASSES = 37


class Net(nn.Module):
    """A block with dropout, a batch norm and a tied head; returns the loss of ids, (batch, length)."""

    def __init__(self, dropout=0.1, checkpoints=False):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(CLASSES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.head.weight, self.checkpoints = self.table.weight, checkpoints

    def forward(self, ids):
        x = self.table(ids)
        x = x + (checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x))
        return F.cross_entropy(self.head(self.norm(x.flatten(0, 1))), ids.flatten())


def ids(step, rows=6):
    return torch.randint(CLASSES, (rows, 5), generator=torch.Generator().manual_seed(step))


def pair(make):
    """A model, and a copy that trains compiled, without the time of a conversion."""
    torch.manual_seed(0)
    original = make()
    fused = copy.deepcopy(original)
    leave_as_it_is(fused, {"config": {"training": True}})
    return original.train(), fused.train()


def step(model, optimizer, number, calls=1, forward=lambda model, ids: model(ids), **options):
    """One step of ``calls`` backward passes; returns the sum of the losses."""
    total, scaler = 0.0, torch.amp.GradScaler("cpu", init_scale=2.0**14)
    optimizer.zero_grad()
    for call in range(calls):
        loss = forward(model, ids(calls * number + call, 6 - call))
        scaler.scale(loss).backward(**options)
        total += loss.item()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    return total


def in_context(context):
    def forward(model, ids):
        with context():
            return model(ids)

    return forward


def twice(model, ids):
    """A graph that two backward passes share."""
    loss = model(ids)
    loss.backward(retain_graph=True)
    return loss


def thawed_in_turns(model, ids):
    model.block[3].weight.requires_grad_(not model.block[3].weight.requires_grad)
    return model(ids)


def replaced(model, ids):
    model.head.bias = nn.Parameter(model.head.bias.detach() + 1)
    return model(ids)


def hooked(model):
    first, last = model.block[0], model.block[3]
    first.register_forward_hook(lambda module, args, output: output * 2)
    last.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    last.weight.register_hook(lambda grad: grad * 2)
    first.weight.register_post_accumulate_grad_hook(lambda parameter: nn.utils.clip_grad_value_(parameter, 1.0))


def hooked_backward(model):
    model.block[0].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    model.block[3].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))


def frozen(model):
    model.block[0].weight.requires_grad_(False)


def with_lora(model):
    torch.manual_seed(2)
    lora = peft.LoraConfig(target_modules=["block.0", "block.3"], r=2, lora_dropout=0.1, init_lora_weights=False)
    peft.inject_adapter_in_model(lora, model)


HALF = in_context(lambda: torch.autocast("cpu", torch.bfloat16))
# Functions that change the model before the first step, and options of a step.
FEATURES = {
    "accumulation, frozen weights and LoRA": ([frozen, with_lora], {"calls": 4}),
    "hooks": ([hooked], {}),
    "backward hooks": ([hooked_backward], {}),
    "retained graphs": ([], {"forward": twice}),
    "autocast": ([], {"forward": HALF}),
    "anomaly detection": ([], {"forward": in_context(lambda: torch.autograd.set_detect_anomaly(True))}),
    "saved tensors on the CPU": ([], {"forward": in_context(torch.autograd.graph.save_on_cpu)}),
    "a batch norm in eval mode": ([lambda model: model.norm.eval()], {}),
    "changing sets of frozen weights": ([], {"forward": thawed_in_turns}),
    "replaced weights": ([], {"forward": replaced}),
    "checkpoint around the model": (
        [],
        {"forward": lambda model, ids: checkpoint(model, ids, use_reentrant=False)},
    ),
}


SHORT = ["accumulation, frozen weights and LoRA", "hooks"]


@pytest.mark.parametrize("feature", [*SHORT, *exhaustive(*(name for name in FEATURES if name not in SHORT))])
@pytest.mark.parametrize("checkpoints", [False, *exhaustive(True)])
def test_training_loops(feature, checkpoints, heads):
    changes, options = FEATURES[feature]
    models, losses = pair(lambda: Net(checkpoints=checkpoints)), []
    for model in models:
        for change in changes:
            change(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
        torch.manual_seed(1)
        losses.append([step(model, optimizer, number, **options) for number in range(3)])
    assert_same_states(*models, 1e-2 if feature == "autocast" else 1e-6)
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-2 if feature == "autocast" else 1e-6, atol=0)
    fused = models[1]
    assert heads and guard(fused)["hits"] >= 3 and not guard(fused)["misses"]


def assert_same_states(original, fused, tolerance=1e-6):
    state, expected = fused.state_dict(), original.state_dict()
    assert state.keys() == expected.keys()
    torch.testing.assert_close(state, expected, rtol=tolerance, atol=tolerance)


def test_curves_and_statistics(heads):
    models, losses = pair(lambda: Net(dropout=0.0)), []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
        losses.append(torch.tensor([step(model, optimizer, number % 5) for number in range(50)]))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert losses[0][-1] < losses[0][0] / 2
    torch.testing.assert_close(*(dict(model.named_buffers()) for model in models), rtol=1e-4, atol=1e-5)
    assert models[1].norm.num_batches_tracked == 50 and guard(models[1]) == {"hits": 50, "misses": {}}


def saved_bytes(model, ids):
    """Of the tensors other than parameters and buffers that a call of ``model`` saves for backward."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes() if storage.data_ptr() not in own else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids).backward()
    return sum(found.values())


def test_checkpoints_compute_again(heads):
    rows, width, (_, kept) = 1000, 32, [saved_bytes(model, ids(0, 200)) for model in pair(lambda: Net(0.0))]
    own, other = [saved_bytes(model, ids(0, 200)) for model in pair(lambda: Net(0.0, checkpoints=True))]
    assert other <= own and other <= kept - rows * width * 4  # the input of the GELU


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.filterwarnings("ignore:kfconvert. .* backward repeats a forward that ran without gradients")
def test_reentrant_checkpoints_around_the_model_run_the_original(dropout, heads):
    """Their first forward runs without gradients, and both must draw the same random numbers."""
    models = pair(lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(dropout), nn.Linear(64, 8)))
    found, x = [], torch.randn(4, 8)
    for model in models:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        checkpoint(model, leaf, use_reentrant=True).square().mean().backward()
        found.append([leaf.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert not heads and guard(models[1])["hits"] == 0


@pytest.mark.exhaustive
def test_second_derivatives_are_one_error(heads):
    _, fused = pair(Net)
    (grad,) = torch.autograd.grad(fused(ids(0)), [fused.table.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


LLAMA = {"vocab_size": CLASSES, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "use_cache": False}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, intermediate_size=32))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
    ],
)
def test_trainer_of_transformers(options, heads, tmp_path):
    data, models, losses = [{"input_ids": row, "labels": row} for row in ids(0, 16)], pair(llama), []
    usual = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    for model in models:
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=2, **usual, **options
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        losses.append(torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    tolerance = 1e-3 if "bf16" in options else 1e-5
    torch.testing.assert_close(*losses, rtol=tolerance, atol=0)
    assert_same_states(*models, tolerance)
    calls = 3 * options.get("gradient_accumulation_steps", 1)
    assert guard(models[1]) == {"hits": calls, "misses": {}} and heads == ["label_smoothing_factor" not in options]
    # Artifacts need no model= after training, unless accelerate or checkpoints have changed the modules.
    assert bool(zoo.described(models[1])) == (not options or "label_smoothing_factor" in options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision, heads):
    models = pair(llama)
    for model in models:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for number in range(4):
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(input_ids=ids(number), labels=ids(number)).loss)
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert_same_states(*models, 1e-6 if precision == "no" else 1e-3)
    assert guard(models[1]) == {"hits": 4, "misses": {}} and heads == [1]


class Dropped(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.weight, self.checkpoints = nn.Parameter(torch.ones(4096)), checkpoints

    def forward(self, x):
        return checkpoint(self.dropped, x, use_reentrant=False) if self.checkpoints else self.dropped(x)

    def dropped(self, x):
        return F.dropout(x * self.weight, 0.3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_dropout_of_torch_inductor(inside, around):
    """Backward uses the mask of forward, which a checkpoint draws again."""
    torch._dynamo.reset()
    _, fused = pair(lambda: Dropped(inside))
    masks, x = [], torch.ones(4096)
    for _ in range(2):
        outputs = checkpoint(fused, x, use_reentrant=False) if around else fused(x)
        outputs.sum().backward()
        torch.testing.assert_close(fused.weight.grad, outputs.detach())
        masks.append(outputs != 0)
        assert abs(masks[-1].double().mean() - 0.7) < 4 * (0.3 * 0.7 / 4096) ** 0.5
        fused.zero_grad()
    assert not torch.equal(*masks) and guard(fused)["hits"] >= 2 and not guard(fused)["misses"]
