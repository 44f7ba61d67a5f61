"""Eight-bit format of a kernel in memory."""

import dataclasses

INT8, FLOAT8 = "int8", "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """Eight-bit format of a kernel [in, out]: quantized values, and scales that multiply them.

    Attributes:
      dtype: Dtype of the values, INT8 or FLOAT8.
      block: Inputs and outputs that share a scale; None for one scale per output.
      int8_products: Also quantize each row of the input to int8, with one scale per row, so that
        matrix products multiply integers.
    """

    dtype: str
    block: tuple[int, int] | None = None
    int8_products: bool = False
