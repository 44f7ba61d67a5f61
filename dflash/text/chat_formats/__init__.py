"""Formats of reasoning and tool calls: parsers of outputs, and grammars for them."""
