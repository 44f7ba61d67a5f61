"""Registered drafters, each as a chain (or whatever it drafts by default) and as a tree."""

import dataclasses

import pytest

from dflash.config import registry
from dflash.drafters.base import Drafter
from support.models import drafter, takes


@dataclasses.dataclass(frozen=True)
class Form:
    """A registered drafter, as a chain (or whatever it drafts by default) or as a tree."""

    name: str
    tree: bool = False

    def __str__(self):
        return f"{self.name}-tree" if self.tree else self.name

    def build(self) -> Drafter:
        """Returns the drafter with random weights and a small block."""
        return drafter(self.name, block_size=4, tree=self.tree)


_NAMES = sorted(registry.DRAFTERS)
FORMS = [
    *(Form(name) for name in _NAMES),
    *(Form(name, tree=True) for name in _NAMES if takes(name, "tree")),
]
each_form = pytest.mark.parametrize("form", FORMS, ids=str)
# One of each way to draft: none, copies, blocks and their trees, serial heads, a model, a beam. The
# others draft as one of these does; a new strategy is a kind of its own until it is listed here.
_ALIKE = {Form(name) for name in ("dflare", "dflash2", "eagle3", "lilicorr", "medusa", "ubtree")}
_ALIKE |= {Form(form.name, tree=True) for form in _ALIKE} - {Form("eagle3", tree=True)}
KINDS = [form for form in FORMS if form not in _ALIKE]
each_kind = pytest.mark.parametrize("form", KINDS, ids=str)
