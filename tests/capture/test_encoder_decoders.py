"""Encoder-decoders by input_shape: the decoder gets tokens too, and what is fused is right."""

import pytest
import torch
import transformers as hf

from kfconvert.inputs.example import example_call

CPU = torch.device("cpu")
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def t5(kind):
    return kind(hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)).eval()


MODELS = {
    "T5": (lambda: t5(hf.T5Model), (2, 9)),
    "T5 with a head": (lambda: t5(hf.T5ForConditionalGeneration), (2, 9)),
    "BART": (lambda: hf.BartModel(hf.BartConfig(**BART)).eval(), (2, 9)),
    "Whisper": (
        lambda: hf.WhisperModel(hf.WhisperConfig(**BART, **MARKS, num_mel_bins=16, max_source_positions=20)).eval(),
        (2, 16, 40),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_gets_tokens(name):
    make, shape = MODELS[name]
    model = make()
    call = example_call(model, shape, None, CPU, None)
    ids = call.kwargs["decoder_input_ids"]
    assert ids.dtype == torch.int64 and ids.shape == (shape if len(shape) == 2 else (2, 2)) and ids.max() < 64
    with torch.no_grad():
        assert call(model)[0].shape[:2] == ids.shape


def test_an_encoder_alone_gets_no_decoder():
    call = example_call(t5(hf.T5EncoderModel), (2, 9), None, CPU, None)
    assert list(call.kwargs) == ["input_ids"]
