"""Quick, cached queries of the Hugging Face hub."""

from __future__ import annotations

from functools import cache

import huggingface_hub
from huggingface_hub import constants

from .common import HUB_TIMEOUT_S, first_line


class HubUnreachable(Exception):
    """Raised if the hub does not answer. The message has the reason."""


def cached(name: str, filename: str) -> bool:
    """Whether ``filename`` of the repository ``name`` is in the local cache of the hub."""
    try:
        return isinstance(huggingface_hub.try_to_load_from_cache(name, filename), str)
    except huggingface_hub.errors.HFValidationError:
        return False


@cache
def exists(name: str, filename: str) -> bool:
    """Whether the hub has ``filename`` in the repository ``name`` and this user may read it.

    This is a single request with a timeout, because the hub's client retries an unreachable host for half a
    minute.

    Raises:
        HubUnreachable: no answer within HUB_TIMEOUT_S, or HF_HUB_OFFLINE is set.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubUnreachable("HF_HUB_OFFLINE is set")
    if (reason := _unreachable()) is not None:
        raise HubUnreachable(reason)
    try:
        url = huggingface_hub.hf_hub_url(name, filename)
    except huggingface_hub.errors.HFValidationError:
        return False
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S)
    except huggingface_hub.errors.HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise HubUnreachable(first_line(error)) from error
        return False
    except Exception as error:  # the HTTP client of the hub and its errors depend on the version
        raise HubUnreachable(first_line(error)) from error
    return True


def unknown(name: str) -> str | None:
    """Returns why the repository ``name`` cannot be loaded from the hub or its cache; None if it can."""
    try:
        if cached(name, "config.json") or exists(name, "config.json"):
            return None
    except HubUnreachable as error:
        return f"the Hugging Face hub cannot be reached ({error}) and it is not among the built-in architectures"
    return f"the Hugging Face hub has no model {name!r} that you may read"


@cache
def _unreachable() -> str | None:
    """The reason why the hub does not answer, None if it does. Cached, so many models wait for one timeout only."""
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # as above
        return first_line(error)
    return None
