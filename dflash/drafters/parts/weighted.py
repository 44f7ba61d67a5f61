"""Base of drafters with weights, whose shape is read from a checkpoint or fits the target."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from dflash.checkpoints import hf_config
from dflash.config.schema import AUTO, DrafterConfig, TargetArchitecture
from dflash.drafters import base_config
from dflash.drafters.base import Drafter
from dflash.drafters.base_config import BlockDrafterConfig, DrafterShape, LayeredDrafterConfig
from dflash.layers import cache as kv
from dflash.layers.linear import Linear
from dflash.parallel.sharding import Sharding

_MASK_EMBEDDING = "mask_embedding"


class WeightedDrafter(Drafter):
    """Base of drafters with weights.

    Attributes:
      shape_class: Class of the strategy's shapes.
      option_names: Keys of the config group `drafter` that `__init__` takes.
    """

    shape_class: ClassVar[type[DrafterShape]]
    option_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, shape: Any, *, dtype: jnp.dtype, sharding: Sharding):
        """Sets the attributes.

        Subclasses also declare their parameters, and take the arguments that `options` returns.
        """
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        self.sharding = sharding

    @classmethod
    def create(cls, config: DrafterConfig, hf, target: TargetArchitecture, *, dtype, sharding):
        if hf is None:
            shape = cls.architecture_for(target, config.architecture).fit(target)
        else:
            shape = cls.architecture_from_hf(hf).fit(target)
            if config.architecture is not None:
                expected = cls.architecture_for(target, config.architecture).fit(target)
                base_config.check_stated(config, expected, shape)
        if isinstance(config, LayeredDrafterConfig) and config.rope_scaling is not None:
            decoder = hf_config.with_rope_scaling(shape.decoder, config.rope_scaling)
            shape = dataclasses.replace(shape, decoder=decoder)
        windows = ()
        if isinstance(config, BlockDrafterConfig):
            if config.window == AUTO:
                windows = shape.windows
            else:
                shape = shape.seen_through(config.window)
        drafter = cls(shape, dtype=dtype, sharding=sharding, **cls.options(config))
        drafter.windows = windows
        drafter.longest_context = getattr(config, "longest_context", None)
        return drafter

    @classmethod
    def options(cls, config: DrafterConfig) -> dict[str, Any]:
        """Returns the arguments of `__init__` that the config group `drafter` sets."""
        return {name: getattr(config, name) for name in cls.option_names}

    @classmethod
    def with_tensors(
        cls, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> Mapping[str, Any]:
        """Returns config.json with what the tensors of the checkpoint state, by their shapes."""
        return {**config, _MASK_EMBEDDING: True} if _MASK_EMBEDDING in shapes else config

    @classmethod
    def architecture_from_hf(cls, config: Mapping[str, Any]) -> Any:
        """Returns the shape that a checkpoint's config.json describes."""
        return cls.shape_class.from_hf(config)

    @classmethod
    def architecture_for(cls, target: TargetArchitecture, options: Any) -> Any:
        """Returns the shape of a fresh drafter; see `DrafterShape.for_target`."""
        return cls.shape_class.for_target(target, options)

    @classmethod
    def config_to_hf(cls, shape: Any) -> dict[str, Any]:
        """Returns the config.json of a checkpoint with this shape."""
        return {"architectures": [cls.hf_architectures[0]]} | shape.to_hf()

    def feature_projection(self, num_features: int) -> Linear:
        """Returns an abstract linear map from target features [..., C·D] to the draft width."""
        width = self.shape.decoder.hidden_size
        return Linear(
            num_features * (getattr(self.shape, "target_hidden_size", None) or width),
            width,
            ("features", "embed"),
            dtype=self.dtype,
            sharding=self.sharding,
        )

    def context_cache(self, batch: int, max_length: int) -> kv.StaticCache:
        """Returns abstract keys and values of all draft layers for `batch` sequences.

        The capacity leaves room for a whole path past the last position, which `observe` may write.
        """
        return self._static_cache(batch, max_length + self.longest_path, kv.SLOT_TILE)

    def context_cache_pages(self, num_pages: int, page_size: int) -> kv.StaticCache:
        """Returns abstract pages of a context cache, each with `page_size` positions."""
        return self._static_cache(num_pages, page_size, 1)

    def _static_cache(self, batch: int, capacity: int, tile: int) -> kv.StaticCache:
        decoder = self.shape.decoder
        return kv.static_cache(
            num_layers=decoder.num_hidden_layers,
            num_kv_heads=decoder.num_key_value_heads,
            head_dim=decoder.head_dim,
            batch=batch,
            capacity=capacity,
            dtype=self.dtype,
            sharding=self.sharding,
            tile=tile,
        )
