"""What a client asks for, in any dialect: prompts, how to sample, when to stop, what to show."""

import dataclasses
import secrets
from collections.abc import Callable, Iterator

from dflash import errors
from dflash.config.schema import INT32_MAX, MAX_SEED, DecodeConfig, SamplingConfig
from dflash.inference.request import MAX_BIASED, Request, Sampling
from dflash.serving import structure
from dflash.serving.fields import Bounds, Fields, as_ids, as_mapping, as_text
from dflash.serving.refusal import Refusal, unsupported
from dflash.serving.structure import Structure
from dflash.serving.token_names import TokenNames
from dflash.text.grammar import Grammar, Vocabulary
from dflash.text.tokenizer import Tokenizer

MAX_CHOICES = 128  # outputs of one HTTP request, over all of its prompts
MAX_STOPS = 64  # stop strings of a request
MAX_STOP_CHARACTERS = 1000  # of each
NUM_STOP_IDS = 16  # that a request may add to the model's own


@dataclasses.dataclass(frozen=True)
class Model:
    """What is served, as far as requests need to know.

    Attributes:
      name: in /v1/models, and in a request's "model".
      root: the target's checkpoint.
      drafter: the strategy.
      tokenizer: the target's.
      decode: what a request leaves out is as this says.
      eos_ids: the checkpoint's own stop tokens.
      vocab_size: of the target.
      max_length: tokens of a prompt and its output together.
      names: texts of single tokens.
      vocabulary: makes what grammars need of the tokenizer; may raise InputError.
      drafts: whether anything is drafted.
      special_tokens: whether texts that are no chats may spell special tokens.
      compares: whether requests can be decoded without drafting too.
    """

    name: str
    root: str
    drafter: str
    tokenizer: Tokenizer
    names: TokenNames
    vocabulary: Callable[[], Vocabulary]
    decode: DecodeConfig
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_length: int
    drafts: bool
    special_tokens: bool = False
    compares: bool = False


@dataclasses.dataclass(frozen=True)
class Show:
    """What an answer says beside the text.

    Attributes:
      stream: whether it comes piece by piece.
      usage: whether a stream ends with its token counts.
      running_usage: whether every chunk of a stream has them.
      echo: whether the prompt goes before the output.
      logprobs: number of likeliest tokens to report beside each; None: no log-probabilities.
      special_tokens: whether to spell special tokens.
      stop: whether to include the stop string that was found.
      drafts: whether to say which tokens were drafted.
    """

    stream: bool = False
    usage: bool = False
    running_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    special_tokens: bool = False
    stop: bool = False
    drafts: bool = False


@dataclasses.dataclass(frozen=True)
class Ask:
    """One HTTP request for outputs.

    Attributes:
      prompts: token ids; each gives `choices` outputs.
      sampling: of every output; output number i of a prompt is sequence i under its seed.
      max_new_tokens: None: as the config says, or as many as there is room for.
      min_new_tokens: tokens before which nothing stops.
      stop: strings that end an output.
      stop_ids: tokens that do, the model's own included.
      choices: outputs for each prompt.
      show: what the answers say.
      structure: what outputs have to match; None: anything.
      grammar: the same, compiled.
      drafting: whether to draft; without, it is plain decoding, for comparison.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    choices: int = 1
    show: Show = Show()
    structure: Structure | None = None
    grammar: Grammar | None = None
    drafting: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def requests(self, model: Model, ids: Iterator[int]) -> list[Request]:
        """The requests of the outputs: those of the first prompt, then of the next.

        Args:
          model: what they go to.
          ids: numbers that no other request in flight has.
        Raises:
          Refusal: a prompt and its output are too long.
        """
        return [
            Request(
                id=next(ids),
                prompt=prompt,
                max_new_tokens=self._limit(prompt, model),
                sampling=dataclasses.replace(self.sampling, sequence=number),
                stop_ids=self.stop_ids,
                min_new_tokens=self.min_new_tokens,
                logprobs=self.show.logprobs,
                grammar=self.grammar,
                refused=self.show.drafts,
            )
            for prompt in self.prompts
            for number in range(self.choices)
        ]

    def _limit(self, prompt: tuple[int, ...], model: Model) -> int:
        room = model.max_length - len(prompt)
        asked = self.max_new_tokens
        if asked is None:
            asked = max(1, min(model.decode.max_new_tokens, room))
        if asked > room:
            raise Refusal(
                f"{len(prompt)} prompt tokens and {asked} new ones are {len(prompt) + asked}, but "
                f"the context holds {model.max_length}; shorten one",
                param="max_tokens" if len(prompt) < model.max_length else "prompt",
                code="context_length_exceeded",
            )
        if self.min_new_tokens > asked:
            raise Refusal(
                f"min_tokens: {self.min_new_tokens} is more than the limit of {asked}",
                param="min_tokens",
            )
        return asked


@dataclasses.dataclass(frozen=True)
class Names:
    """What dialects call the same fields."""

    limits: tuple[str, ...]  # of which one may be given
    least: str
    seeds: tuple[str, ...]
    structure: Callable[[Fields], Structure | None]


OPENAI = Names(
    ("max_completion_tokens", "max_tokens"), "min_tokens", ("seed",), structure.of_openai
)
SGLANG = Names(
    ("max_new_tokens",), "min_new_tokens", ("sampling_seed", "seed"), structure.of_sglang
)


def check_model(fields: Fields, model: Model) -> None:
    """Refuses requests for another model."""
    asked = fields.text("model")
    if asked not in (None, model.name, model.root):
        raise Refusal(
            f"model: no such model; this server has {model.name!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def read_ask(
    fields: Fields, model: Model, names: Names, prompts: tuple[tuple[int, ...], ...], show: Show
) -> Ask:
    """The fields that all dialects have.

    Args:
      fields: of the request; what is read here is taken from them.
      model: what is served.
      names: what the dialect calls them.
      prompts: read already.
      show: likewise.
    Raises:
      Refusal: a field cannot be served; names it.
    """
    ask = Ask(
        prompts=prompts,
        sampling=_sampling(fields, model, names),
        max_new_tokens=_first_integer(fields, names.limits, Bounds(1, model.max_length)),
        min_new_tokens=_least(fields, model, names),
        stop=_stops(fields),
        stop_ids=_stop_ids(fields, model),
        choices=fields.integer("n", Bounds(1, MAX_CHOICES)) or 1,
        show=show,
        structure=names.structure(fields),
        drafting=fields.flag("drafting", True),
    )
    if ask.choices * len(prompts) > MAX_CHOICES:
        raise Refusal(
            f"n: {ask.choices} outputs for each of {len(prompts)} prompts; expected at most "
            f"{MAX_CHOICES} in all",
            param="n",
        )
    if ask.structure is not None and not ask.stop_ids:
        param = ask.structure.param
        message = f"{param}: needs a token to end with; give stop_token_ids, or no ignore_eos"
        raise Refusal(message, param=param)
    if not ask.drafting and not model.compares:
        raise unsupported("drafting", "false needs a server with serve.compare=true")
    return ask


def _sampling(fields: Fields, model: Model, names: Names) -> Sampling:
    given = {"logit_bias": _logit_bias(fields, model)}
    for field in dataclasses.fields(SamplingConfig):
        bounds = Bounds(field.metadata["minimum"], field.metadata["maximum"])
        if field.name == "seed":
            given["seed"] = _first_integer(fields, names.seeds, bounds)
        elif field.name == "top_k":
            given["top_k"] = fields.integer("top_k", Bounds(-1, INT32_MAX))
        else:
            given[field.name] = fields.number(field.name, bounds)
    if given["top_k"] == -1:  # a way to say that it is off
        given["top_k"] = 0
    given = {name: value for name, value in given.items() if value is not None}
    sampling = dataclasses.replace(Sampling.from_config(model.decode), **given)
    if "seed" not in given and sampling.temperature:
        # Like requests are not to get like answers.
        sampling = dataclasses.replace(sampling, seed=secrets.randbelow(MAX_SEED + 1))
    return sampling


def _logit_bias(fields: Fields, model: Model) -> tuple[tuple[int, float], ...] | None:
    given = fields.take("logit_bias")
    if given is None:
        return None
    biases = Fields(as_mapping(given, "logit_bias"), "logit_bias")
    found = {}
    for name in given:
        token = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else None
        if token is None or token >= model.vocab_size:
            param = biases.path(name)
            message = f"{param}: expected a token id of the vocabulary of {model.vocab_size}"
            raise Refusal(message, param="logit_bias")
        found[token] = biases.number(name, Bounds(-100, 100)) or 0.0
    if len(found) > MAX_BIASED:
        raise Refusal(f"logit_bias: expected at most {MAX_BIASED} tokens", param="logit_bias")
    return tuple(sorted(found.items()))


def _first_integer(fields: Fields, names: tuple[str, ...], bounds: Bounds) -> int | None:
    """The value of several names for the same; they may not differ."""
    given = {name: fields.integer(name, bounds) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if len(set(given.values())) > 1:
        *others, last = given
        raise Refusal(f"{last}: differs from {others[0]}; give one of them", param=last)
    return next(iter(given.values()), None)


def _least(fields: Fields, model: Model, names: Names) -> int:
    given = fields.integer(names.least, Bounds(0, model.max_length))
    return model.decode.min_new_tokens if given is None else given


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.take("stop")
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        expected = f"a string, or a list of at most {MAX_STOPS}"
        raise Refusal(f"stop: expected {expected}", param="stop")
    for place, text in enumerate(stops):
        if not 0 < len(as_text(text, f"stop[{place}]")) <= MAX_STOP_CHARACTERS:
            expected = f"1 to {MAX_STOP_CHARACTERS} characters"
            raise Refusal(f"stop[{place}]: expected {expected}", param="stop")
    return tuple(dict.fromkeys(stops))


def _stop_ids(fields: Fields, model: Model) -> tuple[int, ...]:
    given = fields.take("stop_token_ids")
    ids = () if given is None else as_ids(given, "stop_token_ids", model.vocab_size)
    if len(set(ids)) > NUM_STOP_IDS:
        raise Refusal(f"stop_token_ids: expected at most {NUM_STOP_IDS}", param="stop_token_ids")
    ignored = fields.flag("ignore_eos", model.decode.ignore_eos)
    own = () if ignored else model.eos_ids
    return tuple(sorted({*own, *model.decode.stop_ids, *ids}))


def prompt_of_text(
    text: str, param: str, model: Model, *, complete: bool = True
) -> tuple[int, ...]:
    """Ids of a text that is no chat.

    Args:
      text: of the client.
      param: the field that it came in.
      model: what it goes to.
      complete: whether to add what the tokenizer's files say at a text's ends.
    Raises:
      Refusal: it cannot be encoded.
    """
    try:
        ids = model.tokenizer.encode(
            text, special_tokens=model.special_tokens, add_special_tokens=complete
        )
    except errors.InputError as error:
        raise Refusal(str(error), param=param) from error
    return tuple(ids)


def checked_prompt(ids: tuple[int, ...], param: str, model: Model) -> tuple[int, ...]:
    """A prompt that the target knows, that is not empty, and that leaves room for an output.

    Raises:
      Refusal: it is, or does not.
    """
    if not ids:
        raise Refusal(f"{param}: empty; expected at least one token", param=param)
    if max(ids) >= model.vocab_size:
        raise Refusal(
            f"{param}: token {max(ids)} is outside the vocabulary of {model.vocab_size}: the "
            "tokenizer does not fit the target",
            param=param,
        )
    if len(ids) >= model.max_length:
        raise Refusal(
            f"{param}: {len(ids)} tokens, but the context holds {model.max_length}, the output "
            "included; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    return ids
