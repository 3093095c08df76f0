"""The doctor's diagnosis as sections for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ep_ray.backends import registry
from ep_ray.topology import gpus_in
from sweeps.available import merged
from sweeps.doctor.diagnosis import Ability, Diagnosis
from sweeps.doctor.node import UNLIMITED, Node
from sweeps.tablefmt import Section, Table, text_table


def sections(diagnosis: Diagnosis) -> list[Section]:
    """What there is, what it can measure, and what to mend."""
    nodes = diagnosis.nodes
    found = [(f.level, f.where, f.text) for f in diagnosis.findings]
    return [
        Section("Machines", (_machines(nodes), *_gpus(nodes), *_nics(nodes), *_links(nodes))),
        Section("Software", (_software(nodes), _backends(nodes))),
        Section("What can be measured", (_abilities("measure", diagnosis.measures),)),
        Section("Shipped experiments", (_abilities("experiment", diagnosis.experiments),)),
        Section(
            "Findings",
            (text_table("", ("level", "where", "what"), found) if found else "None.",),
        ),
    ]


def _machines(nodes: Sequence[Node]) -> Table:
    columns = ("machine", "address", "CPU", "cores", "memory GiB", "/dev/shm GiB",
               "locked memory", "ephemeral ports", "Ray workers' ports", "GPUDirect")  # fmt: skip
    rows = [
        (
            n.machine.hostname,
            n.ip,
            n.machine.cpu,
            n.machine.cores,
            n.machine.memory_gib,
            f"{n.shm_bytes / 2**30:.1f}",
            "unlimited" if n.memlock_bytes == UNLIMITED else f"{n.memlock_bytes >> 10} KiB",
            _span(n.ephemeral_ports),
            _span(n.ray_workers) if n.ray_workers else "",
            ", ".join(word for word, there in n.gpudirect.items() if there) or "none",
        )
        for n in nodes
    ]
    return text_table("", columns, rows)


def _span(ports: tuple[int, int]) -> str:
    return f"{ports[0]}-{ports[1]}"


def _gpus(nodes: Sequence[Node]) -> list[Table]:
    columns = ("machine", "GPU", "name", "memory GiB", "driver", "SM MHz", "of", "W", "°C", "held")
    rows = []
    for node in nodes:
        states = {state.index: state for state in node.gpu_states}
        for gpu in node.machine.gpus:
            row = (node.machine.hostname, gpu.index, gpu.name, f"{gpu.memory_mib / 1024:.0f}")
            s = states.get(gpu.index)
            now = (
                (s.driver, s.sm_clock_mhz, s.max_sm_clock_mhz, s.power_w, s.temperature_c,
                 ", ".join(s.throttled))
                if s else ("",) * 6
            )  # fmt: skip
            rows.append((*row, *now))
    return [text_table("GPUs", columns, rows)] if rows else []


def _nics(nodes: Sequence[Node]) -> list[Table]:
    columns = ("machine", "device", "port", "driver", "state", "rate", "link layer")
    rows = [
        (node.machine.hostname, p.device, p.port, p.driver, p.state, p.rate, p.link_layer)
        for node in nodes
        for p in node.nics
    ]
    return [text_table("RDMA devices", columns, rows)] if rows else []


def _links(nodes: Sequence[Node]) -> list[Table]:
    """GPUs and NICs over GPUs; machines with equal links stand together."""
    alike: dict[str, list[Node]] = {}
    for node in nodes:
        if len(gpus_in(node.links)) > 1:
            alike.setdefault(str(node.links), []).append(node)
    tables = []
    for same in alike.values():
        links = same[0].links
        gpus = gpus_in(links)
        rows = [(name, *[row.get(gpu, "") for gpu in gpus]) for name, row in links.items()]
        names = ", ".join(node.machine.hostname for node in same)
        tables.append(text_table(f"Links of {names}", ("", *gpus), rows))
    return tables


def _software(nodes: Sequence[Node]) -> Table:
    facts = [
        {**n.versions, "CUDA of torch": n.torch.cuda or "CPU build", "NCCL": n.torch.nccl or "none",
         "build of vLLM": n.vllm or "none", "nvidia-ml-py": "yes" if n.nvml else "no"}
        for n in nodes
    ]  # fmt: skip
    names = dict.fromkeys(name for fact in facts for name in fact)
    rows = [(name, _one(fact.get(name, "none") for fact in facts)) for name in names]
    return text_table("", ("what", "version"), rows)


def _one(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def _backends(nodes: Sequence[Node]) -> Table:
    rows = []
    for name in nodes[0].backends:
        reasons = merged([(node.machine.hostname, node.backends[name]) for node in nodes])
        ran = registry.STATUS[name][0].value
        rows.append((name, "no" if reasons else "yes", ran, "\n".join(reasons)))
    columns = ("backend", "runs here", "as far as it was run", "why not")
    return text_table("Backends", columns, rows)


def _abilities(what: str, abilities: Sequence[Ability]) -> Table:
    rows = [(a.name, "yes" if a.can else "no", a.why) for a in abilities]
    return text_table("", (what, "runs here", "with, or what it lacks"), rows)
