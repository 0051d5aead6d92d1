"""The GPU dashboard against what NVIDIA's dcgm-exporter exports: names, labels and units, without a GPU.

parashard exports the memory, the copied bytes and the waits of its workers' GPUs. The exporter's sample follows its own
sources: names, types and units are in `etc/default-counters.csv`, labels in
`internal/pkg/rendermetrics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.contents import GPU
from support.prometheus_server import expressions_show, named, needs_promtool

MIB = 2**20
DEVICES = (("node-a", "0"), ("node-a", "1"), ("node-b", "0"))
EXPORTED = {
    "DCGM_FI_DEV_SM_CLOCK": ("SM clock frequency (in MHz).", (1980, 345, 1755)),
    "DCGM_FI_DEV_GPU_TEMP": ("GPU temperature (in C).", (61, 30, 58)),
    "DCGM_FI_DEV_POWER_USAGE": ("Power draw (in W).", (512.25, 71.5, 480)),
    "DCGM_FI_DEV_GPU_UTIL": ("GPU utilization (in %).", (97, 0, 88)),
    "DCGM_FI_DEV_XID_ERRORS": ("Value of the last XID error encountered.", (0, 0, 79)),
    "DCGM_FI_DEV_FB_USED": ("Framebuffer memory used (in MiB).", (71234, 4, 512)),
}
SHOWN = {
    "Utilisation": ("percent", (97, 0, 88)),
    "Memory used": ("bytes", (71234 * MIB, 4 * MIB, 512 * MIB)),
    "Power": ("watt", (512.25, 71.5, 480)),
    "Temperature": ("celsius", (61, 30, 58)),
    "Clock": ("hertz", (1.98e9, 3.45e8, 1.755e9)),
    "Xid errors": ("short", (0, 0, 79)),
}
"""Of each panel: its unit, and what it shows of each GPU."""
OF_WORKERS = {
    "Memory by worker": ("bytes", (71234 * MIB, 71234 * MIB, 512 * MIB)),
    "Copies by worker": ("Bps", (30.0, 3.0, 0.0)),
    "Waiting for the GPU": ("percentunit", (0.5, 0.25, 1.0)),
}
"""The same of parashard's own."""


def exposition() -> Iterator[str]:
    """Yield the lines that the exporters of two hosts answer with."""
    for name, (text, values) in EXPORTED.items():
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} gauge"
        for (host, gpu), value in zip(DEVICES, values, strict=True):
            uuid = f"GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e5{gpu}"
            labels = f'gpu="{gpu}",UUID="{uuid}",pci_bus_id="00000000:0{gpu}:00.0",device="nvidia{gpu}"'
            yield f'{name}{{{labels},modelName="NVIDIA H200",Hostname="{host}",DCGM_FI_DRIVER_VERSION="570.1"}} {value}'


def scraped() -> Iterator[tuple[str, str]]:
    """Yield a scrape's series and their values."""
    for family in text_string_to_metric_families("\n".join(exposition()) + "\n"):
        for sample in family.samples:
            labels = {**sample.labels, "job": "dcgm", "instance": f"{sample.labels['Hostname']}:9400"}
            yield named(sample.name, labels), f"{sample.value}x15"
    for number, (size, copied, waits) in enumerate(zip(*(values for _, values in OF_WORKERS.values()), strict=True)):
        of = {"run": "digits", "worker": f"worker-{number}"}
        for memory, told in (("used", size), ("total", 143771 * MIB)):
            yield named("parashard_worker_gpu_memory_bytes", {**of, "memory": memory}), f"{told}x15"
        for way, share in (("in", 40), ("out", 20)):  # of a minute's 60 s
            yield named("parashard_worker_gpu_copied_bytes_total", {**of, "way": way}), f"0+{share * copied}x15"
        yield named("parashard_worker_gpu_wait_seconds_total", of), f"0+{20 * waits}x15"
        yield named("parashard_worker_phase_seconds_total", {**of, "phase": "compute"}), "0+20x15"


@needs_promtool
def test_every_panel_shows_every_gpu_in_its_unit(tmp_path: Path) -> None:
    shown: list[tuple[str, list[tuple[dict[str, str], float]]]] = []
    for panel in GPU.panels:
        unit, values = (OF_WORKERS | SHOWN)[panel.title]
        assert panel.unit == unit
        if panel.title in OF_WORKERS:
            assert [query.legend for query in panel.queries] == ["{{worker}}"]
            workers = [({"worker": f"worker-{number}"}, float(value)) for number, value in enumerate(values)]
            expression = panel.queries[0].expr.replace("$run", "digits").replace("$__rate_interval", "5m")
            shown.append((expression, workers))
            continue
        assert [query.legend for query in panel.queries] == ["{{Hostname}} {{gpu}}"]
        devices = [({"Hostname": host, "gpu": gpu}, value) for (host, gpu), value in zip(DEVICES, values, strict=True)]
        shown.append((panel.queries[0].expr, devices))
    expressions_show(tmp_path, scraped(), shown)
