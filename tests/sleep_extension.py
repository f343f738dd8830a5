"""A worker extension for servers under test: `vllm serve --worker-extension-cls sleep_extension.Budget`."""

import os


class Budget:
    """Adds methods to every worker."""

    def set_host_budget(self, num_bytes: int, rank: int | None = None) -> None:
        """Limit what the host driver may hold, on one rank or on all; 0: no limit."""
        from allocator.shim import lib

        if rank is None or rank == self.rank:  # type: ignore[attr-defined]
            lib.ekv_host_configure(0, num_bytes)

    def refuse_to_sleep(self, rank: int) -> None:
        """Have the next sleep fail on `rank`, after vLLM's own part."""
        from vllm_integration import worker_connectors

        def failing() -> None:
            worker_connectors.give_up_memory = give_up_memory
            raise RuntimeError("the connector does not let go")

        give_up_memory = worker_connectors.give_up_memory
        if rank == self.rank:  # type: ignore[attr-defined]
            worker_connectors.give_up_memory = failing

    def memfd_bytes(self) -> int:
        """Return what the files hold that back the host driver's chunks, as the kernel counts it."""
        total = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:extensible-kv"):
                    total += os.fstat(int(name)).st_blocks * 512
            except OSError:
                continue
        return total
