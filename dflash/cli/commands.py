"""Subcommands of `dflash` and their modules.

This module imports nothing, so that help is instant.
"""

# Name: (module, summary for the help).
COMMANDS = {
    "decode": ("dflash.decode", "Decode prompts with a target and a drafter."),
    "chat": ("dflash.chat", "Talk to a target in the terminal."),
    "serve": ("dflash.serve", "Serve a target over HTTP: OpenAI's API, metrics, a web page."),
    "train": ("dflash.train", "Train a drafter, or a target."),
    "distill": ("dflash.distill", "Make a drafter for a target: answers, training, measurement."),
    "benchmark": ("dflash.benchmark", "Measure drafting strategies against plain decoding."),
    "check": ("dflash.check", "Diagnose a pair of target and drafter."),
    "sweep": ("dflash.sweep", "Run a config over a grid of values."),
    "compile": ("dflash.compile", "Compile a run for TPUs, without a TPU."),
    "convert": ("dflash.convert", "Convert a checkpoint to another layout."),
    "doctor": ("dflash.doctor", "Report what is installed, missing and cached."),
}
