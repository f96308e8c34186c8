"""`dflash-eval hosts check` and `hosts trust`: is every machine as the inventory says, and which host keys are theirs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.prompt import Confirm
from rich.table import Table

from dflash_model.errors import InputError
from tasks.remote.chain import find_untrusted
from tasks.remote.checking import HostReport, check_hosts, shortcomings
from tasks.remote.inventory import SSH, read_inventory
from tasks.remote.known_hosts import Verdict, add_known_host
from tasks.remote.opening import endpoint_of


def check(hosts: Path, *, home: Path) -> int:
    """Print one row a host and who reaches whom; exit code 3 where a host cannot be used. Raises InputError."""
    inventory = read_inventory(hosts, home=home)
    reports = check_hosts(inventory)
    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("host", "via", "roles", "cores", "load", "memory", "disk", "clock", "python, packages", "gpus", "locks"):
        table.add_column(column)
    for report in reports:
        roles = inventory.entry(report.name).roles
        table.add_row(report.name, report.via, ", ".join(roles), *_cells(report))
    console.print(table)
    unusable = 0
    for report in reports:
        for phrase in shortcomings(report, inventory.entry(report.name).roles):
            unusable += 1
            console.print(f"[red]{escape(report.name)}[/red]: {escape(phrase)}", soft_wrap=True, highlight=False)
            if report.problem is not None and report.problem.fix:
                console.print(f"  fix: {escape(report.problem.fix)}", soft_wrap=True, highlight=False)
    reaching = [f"{report.name} reaches {name}" for report in reports for name, open_ in report.reaches.items() if open_]
    pairs = sum(len(report.reaches) for report in reports)
    if pairs:
        console.print(
            f"Pairs that reach each other: {'; '.join(reaching) or 'none'} (of {pairs} tried).", soft_wrap=True, highlight=False
        )
    return 3 if unusable else 0


def _cells(report: HostReport) -> tuple[str, ...]:
    if report.problem is not None:
        return ("-",) * 8
    packages = str(report.packages) if report.packages else "-"
    skew = "-" if report.clock_skew_s is None else f"{report.clock_skew_s:+.1f} s"
    return (
        report.cores,
        report.load,
        _gib(report.memory_bytes),
        _gib(report.disk_bytes),
        skew,
        packages,
        "; ".join(report.gpus) or "-",
        "; ".join(report.locks) or "-",
    )


def _gib(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"


def trust(hosts: Path, name: str, *, home: Path, yes: bool) -> int:
    """Show the key that a host offers and, once confirmed, add it to its known_hosts file. Raises InputError or HostError."""
    entry = read_inventory(hosts, home=home).entry(name)
    if entry.via != SSH:
        raise InputError(f"{name} is a directory of this machine; it has no host key.", "Name a host with `via: ssh`.")
    console = Console()
    endpoint = endpoint_of(entry)
    while (untrusted := find_untrusted(endpoint)) is not None:
        hop = next(hop for hop in (*endpoint.jumps, endpoint) if hop.known_as == untrusted.hostname)
        file = hop.known_hosts[0]
        if untrusted.verdict is not Verdict.UNKNOWN:
            raise InputError(
                f"The host key of {untrusted.hostname} is {untrusted.verdict.name.lower()}: it offers {untrusted.fingerprint}.",
                f"Ask its administrator. If it was set up anew, remove its old line from {file} first: a changed key is never added beside it.",
            )
        console.print(f"{untrusted.hostname} offers {untrusted.fingerprint}", highlight=False, soft_wrap=True)
        if not yes and not Confirm.ask("Is that the fingerprint that its administrator gave you?", default=False):
            console.print("Nothing was changed.")
            return 2
        add_known_host(file, untrusted.line)
        console.print(f"Added to {file}.", highlight=False, soft_wrap=True)
    console.print(f"The host key of {name} is known.", highlight=False)
    return 0
