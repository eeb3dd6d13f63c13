"""What a box may use."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Limits:
    """`None`: no limit. `seconds`, `output_bytes` and the total of `memory` are kept from outside.

    `memory` bounds the address space of each process and what all of them hold together.
    `processes` counts threads too. A box's three scratch folders hold `scratch_bytes` each.
    """

    seconds: float | None = 10.0
    cpu_seconds: int | None = None  # None: `seconds`, rounded up
    memory: int | None = 512 << 20
    processes: int | None = 24
    file_bytes: int | None = 1 << 20
    scratch_bytes: int = 64 << 20
    output_bytes: int = 64 << 10  # of stdout and of stderr, each
    open_files: int | None = 64

    def resources(self) -> dict[str, tuple[int, int]]:
        """The soft and hard limit by the name it has in the `resource` module."""
        cpu = self.cpu_seconds
        if cpu is None and self.seconds is not None:
            cpu = math.ceil(self.seconds)
        limits = {
            "AS": self.memory,
            "NPROC": self.processes,
            "FSIZE": self.file_bytes,
            "NOFILE": self.open_files,
            "CORE": 0,
        }
        found = {name: (value, value) for name, value in limits.items() if value is not None}
        return found if cpu is None else {**found, "CPU": (cpu, cpu + 1)}
