"""The outputs of a graph as JSON values: a tree of tuples, lists, dicts and named outputs, with key-value caches."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from ..inputs import (
    CallForm,
    TreeForm,
    UnstorableCache,
    class_name,
    is_record,
    made_kind,
    record_named,
    stored_kind,
)
from .expressions import Unstorable

CONTAINERS: dict[str, type] = {"tuple": tuple, "list": list}


def stored_outputs(outputs: TreeForm) -> dict[str, Any]:
    """Returns ``outputs`` as JSON values for ``made_outputs``. Raises Unstorable, or UnstorableCache."""
    caches = [[index, kind if isinstance(kind, int) else stored_kind(kind)] for index, kind in outputs.caches.items()]
    written = [stored_kind(kind) for kind in outputs.written]
    return {"outputs": _stored_spec(outputs.spec), "caches": caches, "written": written}


def made_outputs(stored: dict[str, Any], call: CallForm) -> TreeForm:
    """Rebuilds the outputs. Files of older versions have no caches."""
    spec = _made_spec(stored["outputs"])
    try:
        caches = {index: kind if type(kind) is int else made_kind(kind) for index, kind in stored.get("caches") or ()}
        written = tuple(map(made_kind, stored.get("written") or ()))
    except UnstorableCache as error:
        raise Unstorable(str(error)) from error
    passed = len(call.form.caches)
    given = [kind for kind in caches.values() if isinstance(kind, int)]
    are_leaves = all(type(index) is int and 0 <= index < spec.num_leaves for index in caches)
    if not (are_leaves and all(0 <= each < passed for each in given)):
        raise Unstorable("its outputs have caches in places that do not exist")
    if len(written) != passed:
        raise Unstorable("it writes to caches that are not its inputs")
    return TreeForm(spec, caches, written)


def _stored_spec(spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return None
    inner = [_stored_spec(each) for each in spec.children()]
    kind: Any = spec.type
    if kind in (tuple, list):
        return {kind.__name__: inner}
    keys = spec.context
    if not (kind is dict or is_record(kind)) or type(keys) is not list or not all(type(key) is str for key in keys):
        raise Unstorable(f"it returns a {kind.__name__}")
    return {"class": list(class_name(kind)), "keys": keys, "items": inner}


def _made_spec(stored: Any) -> pytree.TreeSpec:
    if stored is None:
        return pytree.tree_structure(0)
    if not isinstance(stored, dict):
        raise Unstorable("what it returns is of no known structure")
    if len(stored) == 1:
        ((name, inner),) = stored.items()
        if name in CONTAINERS and isinstance(inner, list):
            return pytree.TreeSpec(CONTAINERS[name], None, [_made_spec(each) for each in inner])
    keys, inner = stored.get("keys"), stored.get("items")
    named = stored.get("class")
    kind = dict if named == list(class_name(dict)) else record_named(named)
    if kind is None or not isinstance(keys, list) or not isinstance(inner, list) or len(keys) != len(inner):
        raise Unstorable("what it returns is of no known structure")
    if len(set(map(str, keys))) < len(keys) or not all(isinstance(key, str) for key in keys):
        raise Unstorable("what it returns is of no known structure")
    return pytree.TreeSpec(kind, keys, [_made_spec(each) for each in inner])
