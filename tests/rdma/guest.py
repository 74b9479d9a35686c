"""Run a command in a small guest whose kernel has RDMA: SoftRoCE, no network card.

    python tests/rdma/guest.py [--limit-s 300] -- python -m pytest tests/rdma

The guest is a QEMU emulation (no KVM) of a Debian kernel over this machine's own root
file system: it sees this checkout, this Python and all libraries, and nothing that it
writes is kept. The command runs as root in the current folder, with one SoftRoCE device
`rxe0` on a dummy network card; its output and exit status come back as if it had run
here. Kernel, initramfs and pyverbs come from Debian's packages and are kept in a cache
folder, which may be empty at first; nothing of them is installed.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(
    os.environ.get("NUMBA_EP_GUEST_DIR") or Path.home() / ".cache/numba_ep-guest"
)
# What this machine needs, by the program or file that shows that it is there.
PACKAGES = {
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/bin/busybox": "busybox-static",
    "/usr/bin/cpio": "cpio",
    "/sbin/modprobe": "kmod",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
    "/sbin/ip": "iproute2",
    "/usr/bin/ib_write_bw": "perftest",
}
KERNEL = "linux-image-6.12.*deb12-amd64"  # 6.1 posts synchronously, cloud has no rxe
MODULES = [
    "netfs", "9pnet", "9pnet_virtio", "9p", "overlay", "crc32_generic", "crc32-pclmul",
    "ib_core", "ib_uverbs", "udp_tunnel", "ip6_udp_tunnel", "rdma_rxe", "dummy", "veth",
    "bridge", "sch_netem",
]  # fmt: skip
# Without AVX2: emulated, NumPy's argsort sorts wrongly with it.
QEMU = [
    "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max,-avx2",
    "-smp", "2", "-m", "6G", "-M", "q35", "-nodefaults", "-no-user-config",
    "-display", "none", "-no-reboot",
]  # fmt: skip
# tsc=reliable: without it, one boot in twelve died on a busy host.
BOOT = (
    "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off nokaslr "
    "random.trust_cpu=on"
)
BOOTS, BOOT_LIMIT_S = 3, 60.0
STEP_LIMIT_S = 300.0
APT_PAUSES_S = (5, 20)


class GuestError(RuntimeError):
    """The guest could not be made, or ended without the command's exit status."""


def run(*command: str, folder: Path | None = None) -> str:
    """Output of a command on this machine; raises GuestError if it fails."""
    done = subprocess.run(
        command, cwd=folder, text=True, timeout=STEP_LIMIT_S, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise GuestError(f"{shlex.join(command)}: {done.stdout[-2000:]}")
    return done.stdout


def apt(*command: str, folder: Path | None = None) -> None:
    """apt-get, again after a while where it fails: that may be the network's fault."""
    print("apt-get", *command, flush=True)
    for pause_s in (*APT_PAUSES_S, None):
        try:
            run("apt-get", "-qq", *command, folder=folder)
            return
        except (GuestError, subprocess.TimeoutExpired) as error:
            if pause_s is None:
                raise
            print(f"again in {pause_s} s: {error}", flush=True)
            time.sleep(pause_s)


def reason_against() -> str:
    """Why there can be no guest here, or nothing."""
    missing = [name for path, name in PACKAGES.items() if not Path(path).exists()]
    if os.uname().machine != "x86_64":
        return "the guest is for x86-64"
    if missing and not (os.geteuid() == 0 and shutil.which("apt-get")):
        return f"missing Debian packages: {' '.join(missing)}"
    return ""


# What the guest is made of.


def install_packages() -> None:
    """Install what is missing, without what would pull systemd along."""
    missing = [name for path, name in PACKAGES.items() if not Path(path).exists()]
    if missing:
        apt("update")
        apt("install", "-y", "--no-install-recommends", *missing)


def unpack_packages(cache: Path) -> None:
    """Kernel and pyverbs into `cache`, from Debian's packages."""
    apt("update")
    found = run("apt-cache", "search", "--names-only", f"^{KERNEL}$").split("\n")
    names = [line.split()[0] for line in found if line]
    if not names:
        raise GuestError(f"apt-cache knows no package {KERNEL}")
    newest = max(names, key=lambda name: [int(n) for n in _numbers(name)])
    apt("download", newest, "python3-pyverbs", folder=cache)
    for package in cache.glob("*.deb"):
        run("dpkg", "-x", str(package), str(cache / "debian"))
        package.unlink()


def _numbers(name: str) -> list[str]:
    digits = "".join(c if c.isdigit() else " " for c in name)
    return digits.split()


def build_initramfs(cache: Path) -> None:
    """busybox, `init.sh` and the modules that mount the host's file system."""
    (folder,) = (cache / "debian/lib/modules").iterdir()
    run("depmod", "-b", str(cache / "debian"), folder.name)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for inside in "bin", "modules", "proc", "sys", "dev", "host", "new", "results":
            (root / inside).mkdir()
        shutil.copy("/bin/busybox", root / "bin/busybox")
        order: list[str] = []
        for module in MODULES:
            shown = run(
                "modprobe", "-d", str(cache / "debian"), "-S", folder.name,
                "--show-depends", module,
            )  # fmt: skip
            files = [x.split()[1] for x in shown.splitlines() if x.startswith("insmod")]
            order += [file for file in files if file not in order]
        for number, file in enumerate(order):
            target = root / f"modules/{number:02}-{Path(file).name}"
            if target.suffix == ".xz":
                plain = lzma.decompress(Path(file).read_bytes())
                target.with_suffix("").write_bytes(plain)
            else:
                shutil.copy(file, target)
        shutil.copy(HERE / "init.sh", root / "init")
        (root / "init").chmod(0o755)
        pack = "find . | cpio -o -H newc --quiet > "
        target = cache / "initramfs.new"
        run("sh", "-c", pack + shlex.quote(str(target)), folder=root)
        target.rename(cache / "initramfs")


def prepare(cache: Path) -> None:
    """Everything that a boot needs; what is in the cache stays."""
    cache.mkdir(parents=True, exist_ok=True)
    install_packages()
    if not (cache / "debian/unpacked").exists():
        shutil.rmtree(cache / "debian", ignore_errors=True)
        unpack_packages(cache)
        (cache / "debian/unpacked").touch()
    image, made_of = cache / "initramfs", [HERE / "init.sh", Path(__file__)]
    newest = max(file.stat().st_mtime for file in made_of)
    if not image.exists() or image.stat().st_mtime < newest:
        build_initramfs(cache)


def check_python(cache: Path) -> None:
    """Debian's pyverbs is compiled for one version of CPython."""
    folder = cache / "debian/usr/lib/python3/dist-packages/pyverbs"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not (folder / f"device{suffix}").exists():
        there = ", ".join(file.name for file in folder.glob("device.*"))
        raise GuestError(
            f"Debian's python3-pyverbs is not for this Python: it has {there}, not "
            f"device{suffix}; run tests/rdma with PYTHON=/usr/bin/python3"
        )


# A boot.


def write_job(results: Path, command: list[str], cache: Path) -> None:
    """The shell script that the guest runs."""
    pyverbs = cache / "debian/usr/lib/python3/dist-packages"
    path = [str(HERE.parent.parent), str(pyverbs), os.environ.get("PYTHONPATH", "")]
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("NUMBA", "PYTHON", "PATH", "HOME", "VIRTUAL_ENV"))
    }
    variables = {**kept, "PYTHONPATH": os.pathsep.join(p for p in path if p)}
    lines = [f"export {n}={shlex.quote(v)}" for n, v in variables.items()]
    lines += [f"cd {shlex.quote(os.getcwd())}", f"exec {shlex.join(command)}"]
    (results / "job").write_text("\n".join(lines) + "\n")


def boot(cache: Path, results: Path, limit_s: float) -> bool:
    """One guest, until it powers off; prints what its job does: has it started?"""
    kernel = next((cache / "debian/boot").glob("vmlinuz-*"))
    shares = []
    for tag, path, rest in (("host", "/", ",readonly=on"), ("results", results, "")):
        shares += [
            "-fsdev",
            f"local,id={tag},path={path},security_model=none,multidevs=remap{rest}",
            "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
        ]  # fmt: skip
    command = [
        *QEMU, *shares, "-serial", f"file:{results / 'console'}",
        "-kernel", str(kernel), "-initrd", str(cache / "initramfs"), "-append", BOOT,
    ]  # fmt: skip
    guest = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    (results / "output").touch()
    with (results / "output").open(errors="replace") as output:
        try:
            start = time.monotonic()
            while guest.poll() is None:
                started = (results / "started").exists()
                if time.monotonic() - start > (limit_s if started else BOOT_LIMIT_S):
                    break
                print(output.read(), end="", flush=True)
                time.sleep(0.1)
        finally:
            guest.kill()
            guest.wait()
            print(output.read(), end="", flush=True)
    return (results / "started").exists()


def run_in_guest(command: list[str], cache: Path, limit_s: float) -> int:
    """Exit status of `command`; raises GuestError if the guest fails."""
    for _ in range(BOOTS):
        with tempfile.TemporaryDirectory(prefix="numba_ep-guest-") as name:
            results = Path(name)
            write_job(results, command, cache)
            started = boot(cache, results, limit_s)
            console = _text(results / "console")
            if (results / "status").exists():
                return int(_text(results / "status"))
        if started:
            # Never again: a command that kills its guest must not pass.
            raise GuestError(
                f"the guest died or took more than {limit_s:g} s\n{console}"
            )
    raise GuestError(f"{BOOTS} boots failed; the last one said\n{console}")


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def main() -> int:
    """The command's exit status, or 125 if there was no guest."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--cache", type=Path, default=CACHE, help=f"default: {CACHE}")
    p.add_argument("--limit-s", type=float, default=300.0, help="for the command")
    p.add_argument("--reason", action="store_true", help="say why there can be none")
    p.add_argument("command", nargs="*")
    options = p.parse_args()
    # So that the guest and its files go, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.reason:
        print(reason_against())
        return 0
    try:
        if reason := reason_against():
            raise GuestError(reason)
        prepare(options.cache)
        check_python(options.cache)
        return run_in_guest(options.command, options.cache, options.limit_s)
    except (GuestError, subprocess.TimeoutExpired) as error:
        print(f"guest: {error}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
