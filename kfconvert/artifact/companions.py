"""Files of a Hugging Face model besides its weights: the configuration, and the tokenizer or processor.

With these files ``AutoModel.from_pretrained`` and ``AutoTokenizer.from_pretrained`` read an artifact like the result of
``save_pretrained``, without kfconvert.
"""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG_FILES = frozenset(("config.json", "generation_config.json"))
# The files that tokenizers and processors of transformers write.
PROCESSOR_FILES = frozenset((
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "normalizer.json", "spiece.model", "tokenizer.model",
    "sentencepiece.bpe.model", "source.spm", "target.spm", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
))  # fmt: skip
COMPANIONS = CONFIG_FILES | PROCESSOR_FILES


def write_companions(model: nn.Module, folder: Path) -> None:
    """Write to ``folder`` the configuration of a Hugging Face model, and its tokenizer or processor files from the
    model's origin: a local folder, or the cache of the hub. Does nothing for other models.

    Raises:
        OSError: the files cannot be read or written.
    """
    if not is_of_transformers(model):
        return
    written: Any = model
    config = copy.deepcopy(written.config)
    config.architectures = [type(model).__name__]
    config.dtype = written.dtype
    config.to_json_file(folder / "config.json")
    if written.can_generate():
        written.generation_config.to_json_file(folder / "generation_config.json")
    for name in sorted(PROCESSOR_FILES):
        if (file := _of_origin(written, name)) is not None:
            shutil.copyfile(file, folder / name)


def remember_origin(model: nn.Module, folder: Path) -> None:
    """Record ``folder`` as the origin of a Hugging Face model, so that ``save`` copies its tokenizer files."""
    if is_of_transformers(model):
        config: Any = model.config
        config.name_or_path = str(folder)


def is_of_transformers(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    # If nobody has imported the class, there is no such model; accessing it in ``transformers`` would import it here.
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def is_of_diffusers(model: nn.Module) -> bool:
    modeling = sys.modules.get("diffusers.models.modeling_utils")  # None if not imported
    return modeling is not None and isinstance(model, modeling.ModelMixin)


def _of_origin(model: Any, name: str) -> Path | None:
    """Returns the file ``name`` at the origin of ``model``, None if either does not exist."""
    import huggingface_hub

    origin, revision = str(model.config.name_or_path or ""), getattr(model.config, "_commit_hash", None)
    if not origin:
        return None
    if revision is None:  # the origin, if any, is a folder
        found: Any = Path(origin) / name
    else:
        found = huggingface_hub.try_to_load_from_cache(origin, name, revision=revision)
    return Path(found) if isinstance(found, (str, Path)) and Path(found).is_file() else None
