"""Comparison of the vocabularies of two checkpoints."""

import pathlib

from dflash import errors
from dflash.checkpoints import files
from dflash.text.tokenizer import TOKENIZER_JSON


def check_same(target: pathlib.Path, drafter: pathlib.Path) -> None:
    """Checks that the tokenizers of two checkpoints agree, if both have one.

    Vocabularies of equal size may still differ. The target would then reject nearly all drafts,
    with no other sign of the cause. Ids that only one tokenizer has are not compared.
    """
    paths = [directory / TOKENIZER_JSON for directory in (target, drafter)]
    if target == drafter or not all(file.exists() for file in paths):
        return
    target_tokens, drafter_tokens = (_tokens(file) for file in paths)
    for token in sorted(target_tokens.keys() & drafter_tokens.keys()):
        if target_tokens[token] != drafter_tokens[token]:
            raise errors.CheckpointError(
                f"drafter.checkpoint: another vocabulary than the target's: in {paths[1]} token "
                f"{token} is {drafter_tokens[token]!r}, in the target's {target_tokens[token]!r}"
            )


def _tokens(file: pathlib.Path) -> dict[int, str]:
    """Returns the token of each id in a tokenizer.json, for any tokenizer model."""
    content = files.read_json(file)
    try:
        vocabulary = (content.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            tokens = {int(token): str(text) for text, token in vocabulary.items()}
        else:
            tokens = {token: str(text) for token, (text, _) in enumerate(vocabulary)}
        added = content.get("added_tokens") or []
        return tokens | {int(entry["id"]): str(entry["content"]) for entry in added}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise errors.CheckpointError(f"{file}: not a tokenizer's vocabulary") from error
