"""Matrices packed as AutoAWQ and AutoGPTQ pack them, one value at a time."""

import numpy as np

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False, "desc_act": False}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
CONFIGS = {"awq": AWQ, "gptq": GPTQ, "gptq_v2": GPTQ_V2}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # Output in each place of a word, the lowest bits first.


def draw(rng, outputs, inputs, group_size=8):
    """Codes [in, out], zero points and scales [groups, out]."""
    groups = inputs // group_size
    scales = rng.uniform(0.01, 0.1, (groups, outputs)).astype(np.float16)
    return (rng.integers(0, 16, (inputs, outputs)), rng.integers(1, 16, (groups, outputs)), scales)


def plain(codes, zeros, scales):
    """Float32 weights [out, in], by (code - zero) x scale."""
    size = len(codes) // len(scales)
    weights = np.empty(codes.shape, np.float32)
    for i in range(len(codes)):
        weights[i] = (codes[i] - zeros[i // size]) * scales[i // size].astype(np.float32)
    return weights.T


def pack(name, codes, zeros, scales):
    """Tensors by the last part of their names."""
    if name == "awq":
        words, order = _columns(codes, _AWQ_ORDER), _AWQ_ORDER
    else:
        words, order = _columns(codes.T, range(8)).T, range(8)
    stored = zeros - 1 if name == "gptq" else zeros
    tensors = {"qweight": words, "qzeros": _columns(stored, order), "scales": scales}
    if name != "awq":
        size = len(codes) // len(scales)
        tensors["g_idx"] = np.array([i // size for i in range(len(codes))], np.int32)
    return tensors


def _columns(codes, order):
    """Words int32 [rows, columns / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.int64)
    for column in range(words.shape[1]):
        for place, offset in enumerate(order):
            words[:, column] |= codes[:, 8 * column + offset] << (4 * place)
    return words.astype(np.uint32).view(np.int32)
