"""Everything that a serving config may hold."""

import dataclasses

from dflash.config import schema
from dflash.config.schema import option


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """What the server takes on, and when it gives up."""

    model: str | None = None  # name in /v1/models; None: the end of target.checkpoint
    queue: int = option(256, minimum=0, maximum=schema.MAX_BATCH)  # requests that wait for a slot
    max_body_bytes: int = option(4 * 2**20, minimum=1024)  # of a request
    read_s: float = option(30.0, minimum=0.1)  # a client has for sending its request
    send_s: float = option(30.0, minimum=0.1)  # a client may leave an answer unread
    request_s: float = option(3600.0, minimum=0.1)  # a request may take, its wait included
    drain_s: float = option(30.0, minimum=0.0)  # requests have to end after SIGTERM
    # Also decode without drafting, for requests with "drafting": false: a slot beside the others.
    compare: bool = False
    grammars: bool = True  # requests may say what outputs have to match; two programs more


@dataclasses.dataclass(frozen=True)
class ServeDecode(schema.DecodeConfig):
    """`decode` of a server: several requests at a time."""

    batch_size: int = option(8, minimum=1, maximum=schema.MAX_BATCH)
    # Shorter dispatches: what has ended makes room sooner, and new prompts wait less.
    sync_every: int = option(4, minimum=1, maximum=2**16)
    prefix_cache: bool = True
    partial_dispatches: bool = True


@dataclasses.dataclass(frozen=True)
class ServeRun(schema.DecodeRun):
    """Everything that `dflash serve` reads from its config."""

    decode: ServeDecode = dataclasses.field(default_factory=ServeDecode)
    serve: ServeConfig = dataclasses.field(default_factory=ServeConfig)
