"""Low-rank updates of linear maps, as LoRA adapters have them, a different one for each row."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.layers.linear import Linear
from dflash.layers.products import project
from dflash.parallel import parameters


class LowRank(nnx.Module):
    """Updates of one linear map, side by side: x @ a @ b, where a row uses its adapter's columns.

    All adapters together are two products of a few columns, whatever the number of sequences, and
    no weights are gathered. A row without an adapter gets an update of exactly 0.

    Source: Hu et al. 2021, arXiv 2106.09685.
    """

    def __init__(self, linear: Linear, ranks: Mapping[int, int]):
        """Declares the weights of a map's updates.

        Args:
          ranks: Rank of the update of each adapter that has one for this map, by its number.
        """
        rows, columns = linear.kernel.get_value().shape
        build = {"dtype": linear.dtype, "sharding": linear.sharding, "stddev": 0.0}
        # Derived, since the checkpoint of the target does not store them.
        build["is_derived"] = True
        rank = sum(ranks.values())
        self.a = parameters.declare((rows, rank), (linear.axes[0], None), **build)
        self.b = parameters.declare((rank, columns), (None, linear.axes[1]), **build)
        # Adapter of each column of a, and of each row of b.
        self.owners = tuple(number for number, rank in ranks.items() for _ in range(rank))
        self.chosen = nnx.data(None)
        self.sharding = linear.sharding

    def __call__(self, x: jax.Array) -> jax.Array | None:
        """Returns the update of each row of x [B, T, D]; None if no adapters were chosen."""
        if self.chosen is None:
            return None
        own = self.chosen[..., None] == np.array(self.owners, np.int32)
        inner = jnp.where(own, project(x, self.a[...], self.sharding), 0)
        return project(inner.astype(x.dtype), self.b[...], self.sharding)


def choose(module: nnx.Module, adapters: jax.Array | None) -> None:
    """Chooses the adapter of each row for all maps within a module, in place.

    Args:
      module: Module that exists only while a program is traced.
      adapters: int32 [B, T] or [B, 1]; adapter of each row, 0 for none. None leaves all updates
        out.
    """
    if adapters is None:
        return
    for _, inner in nnx.iter_modules(module):
        if isinstance(inner, LowRank):
            inner.chosen = adapters
