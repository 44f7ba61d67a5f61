"""Published acceptance lengths, for forced acceptance."""

from collections.abc import Mapping

ORIGIN = (
    "Qwen3-4B with Qwen3-4B-DFlash-b16, greedy, on TPU v4 and v5p; one run per prompt, from the "
    "results published with tpu-spec-decode"
)


def _shares(*lines: str) -> tuple[float, ...]:
    return tuple(float(share) for line in lines for share in line.split())


# Fraction of cycles that committed 1 … 16 tokens, bonus included. The source rounds to four digits,
# so the fractions of a data set add up to 1 within 0.0001.
HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "aime24": _shares(
        "0.1083 0.1458 0.1189 0.1107 0.0668 0.0464 0.0521 0.0456",
        "0.0309 0.0236 0.0277 0.0285 0.0195 0.0212 0.0171 0.1368",
    ),
    "aime25": _shares(
        "0.1022 0.1271 0.1305 0.0905 0.0767 0.0642 0.0628 0.0428",
        "0.0283 0.0221 0.0297 0.0269 0.0186 0.0228 0.0166 0.1381",
    ),
    "alpaca": _shares(
        "0.3567 0.2509 0.1486 0.0713 0.0499 0.0285 0.0155 0.0131",
        "0.0059 0.0048 0.0048 0.0036 0.0024 0.0024 0.0036 0.0380",
    ),
    "gsm8k": _shares(
        "0.1107 0.1629 0.1270 0.1031 0.0858 0.0662 0.0478 0.0554",
        "0.0391 0.0347 0.0185 0.0250 0.0195 0.0163 0.0152 0.0727",
    ),
    "humaneval": _shares(
        "0.1173 0.1667 0.1111 0.0905 0.0905 0.0494 0.0514 0.0473",
        "0.0329 0.0247 0.0267 0.0247 0.0247 0.0103 0.0103 0.1214",
    ),
    "math500": _shares(
        "0.0744 0.1186 0.0965 0.0854 0.0704 0.0583 0.0603 0.0372",
        "0.0332 0.0402 0.0312 0.0231 0.0291 0.0342 0.0231 0.1849",
    ),
    "mbpp": _shares(
        "0.1381 0.1157 0.1045 0.1007 0.0858 0.0597 0.0597 0.0560",
        "0.0485 0.0373 0.0373 0.0299 0.0224 0.0336 0.0037 0.0672",
    ),
    "mt-bench": _shares(
        "0.1703 0.1864 0.1473 0.0794 0.0852 0.0644 0.0437 0.0357",
        "0.0230 0.0265 0.0219 0.0115 0.0127 0.0081 0.0069 0.0771",
    ),
    "swe-bench": _shares(
        "0.2644 0.2172 0.1896 0.1031 0.0566 0.0511 0.0330 0.0165",
        "0.0118 0.0087 0.0063 0.0087 0.0094 0.0079 0.0024 0.0134",
    ),
}
