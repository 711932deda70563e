"""Units of what benchmarks tell: bytes and microseconds."""

KIB, MIB = 2**10, 2**20


def size_name(nbytes: int) -> str:
    return f"{nbytes // MIB} MB" if nbytes >= MIB else f"{nbytes // KIB} KB"


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
