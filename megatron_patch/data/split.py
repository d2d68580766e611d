"""`--split`: the shares of training and validation data."""

from megatron_patch.errors import UserError


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares (training, validation, neither), summing to 1, of e.g. "99,1" or Megatron's "969,30,1".

    Raises:
        UserError: not two or three numbers >= 0, or no share for training.
    """
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    if len(shares) not in (2, 3) or any(not 0 <= share < float("inf") for share in shares) or shares[0] == 0:
        raise UserError(
            f"--split is two or three shares, training first, e.g. 99,1: {split!r} is not; give shares >= 0"
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return shares[0] / total, shares[1] / total, shares[2] / total
