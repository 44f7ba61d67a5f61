"""Constraints on outputs: JSON schemas, regular expressions, and context-free grammars."""

import dataclasses

from dflash import errors
from dflash.serving.request_error import RequestError
from dflash.text import grammar
from dflash.text.grammar import Grammar, Kind, Vocabulary

_COMPILERS = {"json_schema": grammar.json_schema, "regex": grammar.regex, "lark": grammar.lark}


@dataclasses.dataclass(frozen=True)
class StructuredOutput:
    """Constraint on an output, in source form.

    Attributes:
      kind: Language of `source`.
      source: Text of the constraint.
      param: Full name of the field that held it.
    """

    kind: Kind
    source: str
    param: str

    def compile(self, vocabulary: Vocabulary) -> Grammar:
        """Compiles the constraint, which may block for seconds.

        Raises:
          RequestError: The constraint cannot be used.
        """
        try:
            if self.kind == "json_object":
                return grammar.json_object(vocabulary)
            return _COMPILERS[self.kind](self.source, vocabulary)
        except errors.InputError as error:
            raise RequestError(f"{self.param}: {error}", param=self.param) from error
