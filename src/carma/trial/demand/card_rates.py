"""What cards can do by their data sheets: dense peaks in TFLOP/s, bandwidth in GB/s. No clock, no measurement.

Constants were fitted on an H200. On another card the same kernels take as much longer as its peaks are lower.
"""

from __future__ import annotations

from carma.core.model.values import Record
from carma.trial.cards import card_for


class Rates(Record, frozen=True, kw_only=True):
    sms: int
    peaks: tuple[float, float, float]  # fp32, TF32, half precision
    dram_gbs: float
    # Of power, where the card draws otherwise than an H200: 1 - exp(-(a * SM + b * DRAM) ** c), activities.
    curve: tuple[float, float, float] | None = None


A100_CURVE = (1.785, 0.097, 1.997)  # that of carma_lab/simulator/power.py, from published means of tasks alone
H200 = Rates(sms=132, peaks=(67.0, 495.0, 989.0), dram_gbs=4800.0)
RATES = {
    "h200": H200,
    "gh200": Rates(sms=132, peaks=(67.0, 495.0, 989.0), dram_gbs=4000.0),
    "h100": Rates(sms=132, peaks=(67.0, 495.0, 989.0), dram_gbs=3350.0),
    "h100-pcie": Rates(sms=114, peaks=(51.0, 378.0, 756.0), dram_gbs=2000.0),
    "a100-40gb": Rates(sms=108, peaks=(19.5, 156.0, 312.0), dram_gbs=1555.0, curve=A100_CURVE),
    "a100-pcie-40gb": Rates(sms=108, peaks=(19.5, 156.0, 312.0), dram_gbs=1555.0, curve=A100_CURVE),
    "a100-80gb": Rates(sms=108, peaks=(19.5, 156.0, 312.0), dram_gbs=2039.0, curve=A100_CURVE),
    "a100-pcie-80gb": Rates(sms=108, peaks=(19.5, 156.0, 312.0), dram_gbs=1935.0, curve=A100_CURVE),
}


def rates_of(gpu: str) -> Rates | None:
    """By the name that its driver gives; None for a card that nothing is known of, and for a part of one."""
    if "mig" in gpu.lower().split():
        return None
    card = card_for(gpu)
    return None if card is None else RATES.get(card.alias)
