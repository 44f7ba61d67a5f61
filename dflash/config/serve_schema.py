"""Schema of a serving config."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Literal

from dflash.config import schema
from dflash.config.schema import location, option

# Names of `text.chat_formats.table.FORMATS`.
ToolFormat = Literal[
    *("auto", "none", "hermes", "qwen3_coder", "llama3_json", "harmony", "kimi_k2"),
    "gemma4",
    *("deepseek_v3", "deepseek_v31", "mistral_v3", "mistral_v7", "mistral_v11", "mistral_v13"),
]


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Limits and options of the server; times are in seconds."""

    model: str | None = None  # Name in /v1/models; None: last part of target.checkpoint.
    # Names by which clients reach the server, besides its address and localhost; "*": all names.
    hosts: tuple[str, ...] = ()
    # Origins such as https://chat.example.com whose pages may use the server; "*": all origins.
    origins: tuple[str, ...] = ()
    queue: int = option(256, minimum=0, maximum=schema.MAX_BATCH)  # Maximum of waiting requests.
    # Maximum of requests of one client that run or wait; null: as many as the queue takes.
    client_requests: int | None = option(None, minimum=1)
    # Let requests say by their `priority` which waits; false: all have the priority 0.
    priorities: bool = False
    max_body_bytes: int = option(4 * 2**20, minimum=1024)  # Maximum size of a request body.
    # Maximum of open connections; for another one, the one that is silent for longest is closed.
    connections: int = option(1024, minimum=1, maximum=2**16)
    read_s: float = option(30.0, minimum=0.1)  # Time for a client to send its request.
    send_s: float = option(30.0, minimum=0.1)  # Time that a client may leave a response unread.
    request_s: float = option(3600.0, minimum=0.1)  # Time for a whole request, waiting included.
    drain_s: float = option(30.0, minimum=0.0)  # Time for running requests to end after SIGTERM.
    # Decode requests with "drafting": false without a drafter, in one additional slot.
    compare: bool = False
    # Share cached beginnings of prompts between requests without a cache_salt; false: each of them
    # is on its own, so that neither times nor cached_tokens tell what others have asked.
    share_prefixes: bool = True
    # How the target writes tool calls; auto: found by its chat template. Tools need serve.grammars.
    tool_format: ToolFormat = "auto"
    # Whether answers may begin with reasoning, such as that between <think> and </think>, which
    # chats return apart; auto: found by the chat template.
    reasoning: Literal["auto", "think", "none"] = "auto"
    # LoRA adapters of the target by the name that requests give as their model.
    adapters: Mapping[str, str] = location("adapter", {})
    # Let clients replace the target's weights by those of a checkpoint on this machine.
    update_weights: bool = False
    # Accept requests that constrain their output by a grammar. Compiles two more programs.
    grammars: bool = True


@dataclasses.dataclass(frozen=True)
class ServeDecode(schema.DecodeConfig):
    """`decode` group of a server, with defaults for several requests at a time."""

    batch_size: int = option(8, minimum=1, maximum=schema.MAX_BATCH)
    # Shorter dispatches than offline: slots are freed sooner, and new prompts wait less.
    sync_every: int = option(4, minimum=1, maximum=2**16)
    prefix_cache: bool = True
    partial_dispatches: bool = True


@dataclasses.dataclass(frozen=True)
class ServeRun(schema.DecodeRun):
    """Config of `dflash serve`."""

    decode: ServeDecode = dataclasses.field(default_factory=ServeDecode)
    serve: ServeConfig = dataclasses.field(default_factory=ServeConfig)

    @property
    def model_name(self) -> str:
        """Name of the target in /v1/models."""
        checkpoint = self.target.checkpoint or schema.RANDOM
        return self.serve.model or pathlib.PurePath(checkpoint.removeprefix("hf:")).name
