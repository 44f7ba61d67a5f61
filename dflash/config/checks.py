"""Consistency checks between config keys, without checkpoints or devices.

A check reads the attributes that a group has, so that strategies with the same keys get the same
checks. It yields the keys of a problem, beginning with the one to change, and the message.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dflash.config import distill_schema, registry, schema

Problem = tuple[tuple[str, ...], str]
Check = Callable[[Any], Iterator[Problem]]  # Of a config.
_FILES = "jsonl"  # Name of the data set that reads the user's files.
# Problem of a run that trains on no data set, by whether it has a mixture, and files.
_NO_SHARES = {
    (False, False): "required: a share for each data set, such as {math: 1.0}; or set data.files",
    (True, False): "every share is 0; set one above 0, or set data.files",
    (True, True): f"every share is 0, also that of {_FILES}, which reads data.files; set it to 1",
}
OWN_DATA = (_FILES, "tfds")  # Data sets of which keys below `data` say what they read.
_MESH_AXES = tuple(field.name for field in dataclasses.fields(schema.MeshConfig))


def problems(config: Any) -> Iterator[Problem]:
    """Yields (keys, message) for every inconsistency in `config`."""
    for groups, check in _CHECKS:
        if all(hasattr(config, group) for group in groups):
            yield from check(config)


def _checkpoints(config: Any) -> Iterator[Problem]:
    for group in ("target", "drafter"):
        if not getattr(getattr(config, group, None), "checkpoint", schema.RANDOM):
            key = f"{group}.checkpoint"
            yield (key,), "required: a directory, hf:org/name, or random"


def _random_target(config: Any) -> Iterator[Problem]:
    if config.target.checkpoint != schema.RANDOM:
        return
    for key in ("name", "architecture"):
        if getattr(config.target, key) is None:
            yield (f"target.{key}", "target.checkpoint"), "required by target.checkpoint=random"


def _rope_scaling(config: Any) -> Iterator[Problem]:
    """Checks scalings that replace the checkpoint's."""
    for group in ("target", "drafter"):
        scaling = getattr(getattr(config, group), "rope_scaling", None)
        if scaling is not None:
            for keys, message in _rope_problems(scaling):
                yield tuple(f"{group}.{key}" for key in keys), message


def _target_architecture(config: Any) -> Iterator[Problem]:
    shape = config.target.architecture
    if shape is None:
        return
    prefix = "target.architecture"
    for keys, message in shape_problems(shape):
        yield tuple(f"{prefix}.{key}" for key in keys), message
    yield from _in_vocabulary(config, f"{prefix}.eos_token_id", shape.eos_token_id)


def shape_problems(shape: schema.TargetArchitecture) -> Iterator[Problem]:
    """Yields (fields, message) for every inconsistency in a decoder's shape."""
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if heads % kv_heads:
        keys = "num_attention_heads", "num_key_value_heads"
        yield keys, f"{heads} does not divide into num_key_value_heads={kv_heads} groups"
    if shape.head_dim % 2:
        yield ("head_dim",), f"expected an even number (rotary halves), got {shape.head_dim}"
    if shape.rope_scaling is not None:
        yield from _rope_problems(shape.rope_scaling)
    yield from shape.problems()


def _rope_problems(scaling: schema.RopeScaling) -> Iterator[Problem]:
    """Checks that the blend between scaled and unscaled frequencies has a width.

    That of YaRN, whose ends are rounded outward, has one where its bounds are equal, too.
    """
    ends = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    if scaling.rope_type not in ends:
        return
    low, high = ends[scaling.rope_type]
    span = getattr(scaling, high) - getattr(scaling, low)
    if span < 0 or (span == 0 and scaling.rope_type != "yarn"):
        keys = f"rope_scaling.{low}", f"rope_scaling.{high}"
        yield keys, f"{getattr(scaling, low)} is not below {high}={getattr(scaling, high)}"
    if scaling.rope_type == "yarn" and scaling.beta_slow == 0:
        yield ("rope_scaling.beta_slow",), "expected a number above 0, got 0.0"


def _drafter_architecture(config: Any) -> Iterator[Problem]:
    """Checks a drafter's shape against its block size and the target's shape."""
    drafter, target = config.drafter, config.target.architecture
    shape = _shape(drafter)
    block, trained = getattr(drafter, "block_size", None), getattr(shape, "block_size", None)
    if isinstance(block, int) and trained is not None and block > trained:
        keys = "drafter.block_size", "drafter.architecture.block_size"
        yield keys, f"{block} exceeds drafter.architecture.block_size={trained}"
    mask = getattr(shape, "mask_token_id", None)
    if mask is not None:
        yield from _in_vocabulary(config, "drafter.architecture.mask_token_id", (mask,))
    yield from _layer_ids(config, getattr(shape, "target_layer_ids", None), target)


def _layer_ids(config: Any, layers: tuple[int, ...] | None, target: Any) -> Iterator[Problem]:
    if layers is None:
        return
    key, depth_key = "drafter.architecture.target_layer_ids", "target.architecture"
    if not layers:
        yield (key,), "expected at least one layer, got none"
    if len(set(layers)) < len(layers):
        yield (key,), f"expected distinct layers, got {list(layers)}"
    outside = [layer for layer in layers if target and layer >= target.num_hidden_layers]
    if outside:
        depth = target.num_hidden_layers
        keys = key, f"{depth_key}.num_hidden_layers"
        yield keys, f"no layer {outside[0]} in a target of {depth} layers (0 to {depth - 1})"


def _stop_ids(config: Any) -> Iterator[Problem]:
    yield from _in_vocabulary(config, "decode.stop_ids", config.decode.stop_ids)


def _lengths(config: Any) -> Iterator[Problem]:
    decode = config.decode
    if decode.max_length is not None and decode.max_length <= decode.max_new_tokens:
        keys = "decode.max_length", "decode.max_new_tokens"
        message = (
            f"{decode.max_length} leaves no room for a prompt beside "
            f"decode.max_new_tokens={decode.max_new_tokens}"
        )
        yield keys, message
    if decode.min_new_tokens > decode.max_new_tokens:
        keys = "decode.min_new_tokens", "decode.max_new_tokens"
        yield keys, f"{decode.min_new_tokens} exceeds decode.max_new_tokens={decode.max_new_tokens}"
    for key in ("page_size", "prefill_chunk"):
        value = getattr(decode, key)
        if value & (value - 1):
            yield (f"decode.{key}",), f"expected a power of two, got {value}"


def _exact(config: Any) -> Iterator[Problem]:
    """Checks that no key of decoding lets a token's computation depend on sequences or drafts."""
    decode = config.decode
    if not decode.exact:
        return
    if decode.verify != "coupled":
        keys = "decode.verify", "decode.exact"
        yield keys, f"{decode.verify} draws by the drafts; decode.exact needs coupled"
    if decode.num_pages is not None:
        keys = "decode.num_pages", "decode.exact"
        yield keys, "preempted sequences are computed again as prompts; leave it out"
    for key in ("prefix_cache", "partial_dispatches"):
        if getattr(decode, key):
            keys = f"decode.{key}", "decode.exact"
            yield keys, "changes how many rows are computed at once; leave it out"


def _prompts(config: Any) -> Iterator[Problem]:
    prompts = config.prompts
    if prompts.text and prompts.file is not None:
        yield ("prompts.file", "prompts.text"), "excludes prompts.text; give one of the two"
    if prompts.dataset is None:
        return
    for other in ("text", "file"):
        if getattr(prompts, other):
            keys = "prompts.dataset", f"prompts.{other}"
            yield keys, f"excludes prompts.{other}; give one of the two"
    if prompts.dataset in OWN_DATA:
        message = f"{prompts.dataset} has no prompts; set prompts.file to the file"
        yield ("prompts.dataset",), message
    else:
        yield from _test_sets("prompts.dataset", [prompts.dataset])


def _test_sets(key: str, names: Iterable[str], noun: str = "data set") -> Iterator[Problem]:
    """Checks names of data sets that have questions of their own, or files of prompts."""
    known = set(registry.DATASETS) - {*OWN_DATA}
    for name in names:
        if schema.task_prompts(name, None).file is None and name not in known:
            yield (key,), f"unknown {noun} {name!r}{registry.suggest(name, known)}"


def _strategies(config: Any) -> Iterator[Problem]:
    """Applies the checks of `drafter` to each strategy."""
    for name, drafter in config.strategies.items():
        prefix = f"strategies.{name}"
        alone = types.SimpleNamespace(drafter=drafter)
        beside = types.SimpleNamespace(drafter=drafter, target=config.target)
        for keys, message in (*_checkpoints(alone), *_drafter_architecture(beside)):
            renamed = (re.sub(r"^drafter\b", prefix, key) for key in keys)
            yield tuple(renamed), re.sub(r"\bdrafter\.", f"{prefix}.", message)
        if drafter.overlaps:
            yield (f"{prefix}.overlap",), "is for decoding and serving only; leave it out"
        if getattr(drafter, "block_size", None) == schema.AUTO and (fixed := _fixed_sizes(config)):
            message = "auto depends on acceptance, which is not measured here; give a number"
            yield (f"{prefix}.block_size", fixed), message


def _fixed_sizes(config: Any) -> str | None:
    """Returns the key, if any, because of which acceptance is not measured."""
    if hasattr(config, "tpu"):
        return "tpu"
    if config.study is not None and config.study.name != "load":
        return "study"
    return "acceptance" if config.forced else None


def _tasks(config: Any) -> Iterator[Problem]:
    if config.trace is not None and config.acceptance:
        yield ("trace", "acceptance"), "excludes acceptance; give one of the two"
    if config.forced or config.study is not None:
        return
    if not config.tasks:
        yield ("tasks",), "required: a list of data sets or files, such as [math, mine.jsonl]"
    yield from _test_sets("tasks", config.tasks, noun="task")


def _data(config: Any) -> Iterator[Problem]:
    data = config.data
    makes_files = hasattr(config, "answers")  # A distillation generates its files before training.
    for name in data.mixture:
        if name not in registry.DATASETS:
            near = registry.suggest(name, registry.DATASETS)
            yield (f"data.mixture.{name}", "data.mixture"), f"unknown data set {name!r}{near}"
    if "tfds" in data.shares:
        yield from _tfds(data.tfds)
    if makes_files and data.mixture and _FILES not in data.shares:
        message = (
            f"has no share for {_FILES}, the answers; add one, or leave the mixture out to train "
            "on answers only"
        )
        yield ("data.mixture",), message
    elif makes_files:
        return
    elif not data.shares:
        yield ("data.mixture", "data.files"), _NO_SHARES[bool(data.mixture), bool(data.files)]
    elif data.files and _FILES not in data.shares:
        keys = "data.files", "data.mixture"
        yield (
            keys,
            f"is read by the data set {_FILES}, for which data.mixture has no share; set "
            f"data.mixture.{_FILES}=1, or the other shares to 0 to train on the files alone",
        )
    elif _FILES in data.shares and not data.files:
        yield ("data.files", "data.mixture"), f"required by the data set {_FILES} of data.mixture"


def _tfds(tfds: Any) -> Iterator[Problem]:
    """Checks what the data set tfds reads."""
    if tfds.name is None:
        yield ("data.tfds.name", "data.mixture"), "required by the data set tfds of data.mixture"
    by_pair = tfds.prompt is not None and tfds.response is not None
    any_of_pair = tfds.prompt is not None or tfds.response is not None
    if (tfds.messages is not None) == by_pair or (any_of_pair and not by_pair):
        keys = "data.tfds.messages", "data.tfds.prompt", "data.tfds.response"
        yield keys, "expected either messages, or prompt and response: names of fields of the rows"
    for split in tfds.splits:
        if split not in ("train", "validation", "test"):
            message = "unknown split; expected one of train, validation, test"
            yield (f"data.tfds.splits.{split}",), message


def _distillation(config: Any) -> Iterator[Problem]:
    """Checks the questions, the test data sets, and the decoding of both."""
    if not config.answers.files and config.answers.made is None:
        yield ("answers.files",), "required: JSONL files of questions; or set answers.made"
    if config.test.trees and distill_schema.tree_group(config.drafter) is None:
        yield ("test.trees", "drafter.name"), f"{config.drafter.name!r} does not draft trees"
    if config.test.block_sizes and not hasattr(config.drafter, "block_size"):
        message = f"{config.drafter.name!r} has no block size"
        yield ("test.block_sizes", "drafter.name"), message
    yield from _test_sets("test.tasks", config.test.tasks)
    for key in ("answers", "test"):
        alone = types.SimpleNamespace(target=config.target, decode=getattr(config, key).decode)
        for keys, message in (*_stop_ids(alone), *_lengths(alone), *_exact(alone)):
            renamed = (re.sub(r"^decode\b", f"{key}.decode", dotted) for dotted in keys)
            yield tuple(renamed), re.sub(r"\bdecode\.", f"{key}.decode.", message)


def _sharding_rules(config: Any) -> Iterator[Problem]:
    for name, axes in config.sharding_rules.items():
        key = f"sharding_rules.{name}"
        if name not in schema.SHARDING_RULES:
            near = registry.suggest(name, schema.SHARDING_RULES)
            yield (key,), f"unknown axis {name!r}{near}"
        for axis in dict.fromkeys(axes):
            if axis not in _MESH_AXES:
                near = registry.suggest(axis, _MESH_AXES)
                yield (key,), f"unknown mesh axis {axis!r}{near}"
            elif axes.count(axis) > 1:
                yield (key,), f"names mesh axis {axis!r} twice"


def _batch(config: Any) -> Iterator[Problem]:
    axes = config.sharding_rules.get("batch", ())
    if not set(axes) <= set(_MESH_AXES):
        return
    devices = math.prod(getattr(config.mesh, axis) for axis in axes)
    size = config.decode.batch_size
    if size % devices:
        product = " × ".join(f"mesh.{axis}" for axis in axes)
        keys = "decode.batch_size", *(f"mesh.{axis}" for axis in axes)
        yield keys, f"{size} does not divide over {product} = {devices} devices"


def _kept_features(config: Any) -> Iterator[Problem]:
    if config.train.keep_features is not None and config.task == "target":
        yield ("train.keep_features", "task"), "only drafters are trained on a target's features"


def _training_length(config: Any) -> Iterator[Problem]:
    """Checks a training run's length and the divisibility of its batches."""
    train, microbatches = config.train, config.optimizer.accumulate_steps
    if (train.steps is None) == (train.epochs is None):
        yield ("train.steps", "train.epochs"), "give exactly one of train.steps and train.epochs"
    axes = [axis for axis in config.sharding_rules.get("batch", ()) if axis in _MESH_AXES]
    devices = math.prod(getattr(config.mesh, axis) for axis in axes)
    if train.batch_size % (microbatches * devices):
        keys = "train.batch_size", "optimizer.accumulate_steps", *(f"mesh.{axis}" for axis in axes)
        message = (
            f"{train.batch_size} does not divide into optimizer.accumulate_steps={microbatches} "
            f"microbatches over {devices} device{'s' if devices > 1 else ''}"
        )
        yield keys, message


def _adapters(config: Any) -> Iterator[Problem]:
    """Checks the names of adapters, and what a server does not support beside them."""
    serve = config.serve
    if serve.update_weights and config.target.adapter is not None:
        keys = "serve.update_weights", "target.adapter"
        yield keys, "not with target.adapter, which new weights would not have"
    for name in serve.adapters:
        if not name or not name.isprintable():
            yield ("serve.adapters",), f"{name!r} is no name that a client can give as its model"
        elif name in (config.model_name, config.target.checkpoint):
            message = "is the name of the target itself; choose another one"
            yield (f"serve.adapters.{name}", "serve.model"), message
    if serve.adapters and config.drafter.overlaps:
        message = "not supported with drafter.overlap; set target.adapter to merge one"
        yield ("serve.adapters", "drafter.overlap"), message


def _in_vocabulary(config: Any, key: str, ids: tuple[int, ...]) -> Iterator[Problem]:
    shape = config.target.architecture
    outside = [token for token in ids if shape is not None and token >= shape.vocab_size]
    if outside:
        keys = key, "target.architecture.vocab_size"
        yield keys, f"{outside[0]} is not in the target's vocabulary of {shape.vocab_size}"


def _shape(group: Any) -> Any:
    """Returns the group's architecture, or the default one for random weights."""
    shape = getattr(group, "architecture", None)
    if shape is not None or getattr(group, "checkpoint", None) != schema.RANDOM:
        return shape
    kind = typing.get_type_hints(type(group)).get("architecture")
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next((option() for option in options if dataclasses.is_dataclass(option)), None)


def _draft_model(config: Any) -> Iterator[Problem]:
    """Checks the family of a drafter that is a language model."""
    family = getattr(config.drafter, "family", None)
    if family is not None and family not in registry.TARGETS:
        near = registry.suggest(family, registry.TARGETS)
        yield ("drafter.family",), f"unknown name {family!r}{near}"


def _fixed(config: Any) -> Iterator[Problem]:
    """Checks that training and compile reports choose nothing that only decoding can choose."""
    for key, groups in (("block_size", ("train", "tpu")), ("window", ("train",))):
        elsewhere = any(hasattr(config, group) for group in groups)
        if elsewhere and getattr(config.drafter, key, None) == schema.AUTO:
            yield (f"drafter.{key}",), "auto is for decoding only; give a number, or leave it out"


def _initial_weights(config: Any) -> Iterator[Problem]:
    """Checks that only a drafter without weights starts from those of the target."""
    drafter = config.drafter
    start = drafter.initialize_from
    if start != schema.FRESH and drafter.checkpoint != schema.RANDOM:
        keys = "drafter.initialize_from", "drafter.checkpoint"
        yield keys, f"{start} is for training from scratch: drafter.checkpoint=random"


def _longest_context(config: Any) -> Iterator[Problem]:
    """Checks that cycles without drafts are among the choices."""
    drafter = config.drafter
    if getattr(drafter, "longest_context", None) is not None and not drafter.adaptive:
        keys = "drafter.longest_context", "drafter.block_size"
        yield keys, "needs drafter.block_size=auto, which can decode plainly"


def _divide_rows(config: Any) -> Iterator[Problem]:
    """Checks that divide_rows=false applies to rows that could be divided."""
    if not (config.drafter.divides_rows or config.drafter.adaptive):
        keys = "drafter.divide_rows", "drafter.block_size"
        yield keys, "false has a meaning with drafter.block_size=auto only; leave it out"


def _lookup(config: Any) -> Iterator[Problem]:
    """Checks that drafts which copies may replace form a chain."""
    if config.decode.lookup and getattr(config.drafter, "tree", None) is not None:
        keys = "decode.lookup", "drafter.tree"
        yield keys, "copies replace chains, not trees; leave one of the two out"


def _overlap(config: Any) -> Iterator[Problem]:
    """Checks that a drafter on devices of its own decodes, and drafts what overlap supports."""
    drafter = config.drafter
    if not drafter.overlaps:
        if getattr(drafter, "devices", 1) > 1:
            keys = "drafter.devices", "drafter.overlap"
            yield keys, "needs drafter.overlap=ssd; leave it out"
        return
    if any(hasattr(config, group) for group in ("train", "answers", "tpu")):
        yield ("drafter.overlap",), "is for decoding and serving only; leave it out"
        return
    kind = f"drafter.overlap={drafter.overlap}"
    for key in ("block_size", "window"):
        if getattr(drafter, key, None) == schema.AUTO:
            keys = f"drafter.{key}", "drafter.overlap"
            yield keys, f"auto is not supported with {kind}; give a number, or leave it out"
    if getattr(drafter, "tree", None) is not None:
        keys = "drafter.tree", "drafter.overlap"
        yield keys, f"{kind} drafts chains; leave one of the two out"
    if config.decode.verify != "coupled":
        keys = "decode.verify", "drafter.overlap"
        yield keys, f"{config.decode.verify} is not supported with {kind}; use coupled"
    if config.decode.lookup:
        keys = "decode.lookup", "drafter.overlap"
        yield keys, f"is not supported with {kind}; leave one of the two out"
    if config.decode.exact:
        yield ("drafter.overlap", "decode.exact"), "verifies fewer rows; leave it out"


# Groups that a config must have, and their check.
_CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    ((), _checkpoints),
    (("target",), _random_target),
    (("target",), _target_architecture),
    (("target", "drafter"), _rope_scaling),
    (("target", "drafter"), _drafter_architecture),
    (("drafter",), _draft_model),
    (("drafter",), _fixed),
    (("drafter",), _initial_weights),
    (("drafter", "decode"), _longest_context),
    (("drafter", "decode"), _divide_rows),
    (("drafter", "decode"), _lookup),
    (("drafter",), _overlap),
    (("target", "decode"), _stop_ids),
    (("decode",), _lengths),
    (("decode",), _exact),
    (("prompts",), _prompts),
    (("strategies", "target"), _strategies),
    (("tasks", "trace", "acceptance"), _tasks),
    (("data",), _data),
    (("answers", "test"), _distillation),
    (("sharding_rules",), _sharding_rules),
    (("decode", "mesh", "sharding_rules"), _batch),
    (("serve", "target", "drafter"), _adapters),
    (("train", "optimizer", "mesh", "sharding_rules"), _training_length),
    (("train", "task"), _kept_features),
)
