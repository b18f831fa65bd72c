"""A real SLURM on this machine: munged, slurmctld and one slurmd a fake node, on loopback, while the tests run."""

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scancel", "scontrol")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
GPUS, CPUS, MEMORY_MIB = 8, 64, 480_000
"""What every node claims to have; nobody checks."""

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again; 5 is the least allowed
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={node_port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SrunPortRange={srun_low}-{srun_high}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType={proctrack}
TaskPlugin={task}
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=60
SlurmctldTimeout=30
MessageTimeout=5
KillWait=3
MinJobAge=600
UnkillableStepTimeout=20
JobRequeue=1
DependencyParameters=kill_invalid_depend
EnforcePartLimits=ALL
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_continue,sched_interval=2,sched_min_interval=20000,batch_sched_delay=0
PriorityType=priority/basic
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_port}-{last_port}] CPUs={cpus} Boards=1 \
SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=standard Nodes=ALL Default=YES DefaultTime=10 MaxTime=2-00:00:00 DefMemPerNode=100 State=UP
PartitionName=dev Nodes=n1 MaxTime=00:30:00 DefMemPerNode=100 State=UP
"""
CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=yes
ConstrainRAMSpace=yes
AllowedSwapSpace=0
ConstrainCores=no
ConstrainDevices=no
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def can_track_by_cgroup() -> bool:
    """Whether jobs can be held in control groups as on a cluster: root, and version 1 of memory and freezer."""
    return os.geteuid() == 0 and all(os.access(f"/sys/fs/cgroup/{name}", os.W_OK) for name in ("memory", "freezer"))


class Lab:
    """The cluster: `with Lab() as lab`. Commands run by `lab.run`, with the environment that finds it."""

    def __init__(self, *, nodes: int = 4) -> None:
        self.nodes, self.cgroup = nodes, can_track_by_cgroup()
        self.folder = Path(tempfile.mkdtemp(prefix="gwslurm-", dir="/tmp"))  # short: a socket's path holds 107 signs
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> "Lab":
        try:
            self._configure()
            self._start_munge()
            self._daemon("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
            for number in range(1, self.nodes + 1):
                self._daemon(
                    f"slurmd-n{number}", "slurmd", "-D", "-N", f"n{number}", "-f", str(self.folder / "slurm.conf")
                )
            self.wait_for(lambda: self.idle_nodes() == self.nodes, "all nodes to be idle", within_s=30)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the jobs, then the daemons, then whatever jobs left behind."""
        if len(self.daemons) > 1:
            ids = self.job_ids()
            self.run("scancel", *ids, check=False) if ids else None
            deadline = time.monotonic() + 8
            while self.job_ids() and time.monotonic() < deadline:
                time.sleep(0.1)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(timeout=3)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.leftovers():
            os.kill(process, signal.SIGKILL)
        if self.cgroup:
            self._remove_cgroups()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- use ----------------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, timeout_s: float = 60) -> str:
        """Runs a command in the cluster's environment and returns what it printed, errors too."""
        done = subprocess.run(
            command, env=self.env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def job_ids(self, *states: str) -> list[str]:
        """Jobs that wait or run, or those in the given states."""
        chosen = ("-t", ",".join(states)) if states else ()
        said = self.run("squeue", "-h", "-o", "%i", *chosen, check=False, timeout_s=15)
        return [line for line in said.split() if line.isdecimal()]

    def idle_nodes(self) -> int:
        return len(self.run("sinfo", "-h", "-N", "-p", "standard", "-t", "idle", "-o", "%N", check=False).split())

    def wait_for(self, ready: object, what: str, *, within_s: float) -> None:
        assert callable(ready)
        deadline = time.monotonic() + within_s
        while not ready():
            dead = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            assert not dead, f"{dead} ended while waiting for {what}:\n{self.logs()}"
            assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}\n{self.logs()}"
            time.sleep(0.05)

    def set_node(self, name: str, state: str) -> None:
        """down: its jobs end as NODE_FAIL. resume: back to work, unless it came back by itself."""
        reason = ("reason=test",) if state == "down" else ()
        self.run("scontrol", "update", f"nodename={name}", f"state={state}", *reason, check=state == "down")

    def controller(self) -> subprocess.Popen[bytes]:
        return self.daemons[1]

    def logs(self) -> str:
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in self.folder.glob("log/*")
        )

    def leftovers(self) -> list[int]:
        """Processes of this cluster's jobs: they have our SLURM_CONF and, as only tasks and scripts, a job id."""
        wanted = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                words = (place / "environ").read_bytes().split(b"\0")
                state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if wanted in words and state != "Z" and any(word.startswith(b"SLURM_JOB_ID=") for word in words):
                found.append(int(place.name))
        return found

    # --- start --------------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        for name in ("log", "spool", "state", "run", "munge", "dev"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        (self.folder / "munge").chmod(0o700)
        (self.folder / "plugstack.conf").touch()
        port, (user, host) = free_ports(self.nodes + 1), (getpass.getuser(), socket.gethostname().partition(".")[0])
        text = SLURM_CONF.format(
            folder=self.folder, user=user, host=host, nodes=self.nodes, port=port, node_port=port + 1,
            last_port=port + self.nodes, srun_low=port + 2000, srun_high=port + 2400, cpus=CPUS, memory=MEMORY_MIB,
            gpus=GPUS, proctrack="proctrack/cgroup" if self.cgroup else "proctrack/linuxproc",
            task="task/cgroup" if self.cgroup else "task/none",
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text(CGROUP_CONF if self.cgroup else "CgroupAutomount=no\n")
        for number in range(GPUS):
            (self.folder / "dev" / f"gpu{number}").touch()
        files = f"{self.folder}/dev/gpu[0-{GPUS - 1}]"
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName=n[1-{self.nodes}] Name=gpu File={files}\n")

    def _start_munge(self) -> None:
        key, place = self.folder / "munge" / "key", self.folder / "munge"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._daemon(
            "munged", "munged", "--foreground", "--force", f"--socket={self.folder}/run/munge.sock",
            f"--key-file={key}", f"--log-file={place}/log", f"--pid-file={place}/pid", f"--seed-file={place}/seed",
            "--num-threads=2", "--group-update-time=-1",
        )  # fmt: skip
        self.wait_for((self.folder / "run" / "munge.sock").exists, "munge's socket", within_s=5)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self.daemons.append(
                subprocess.Popen(
                    command, env=self.env, cwd=self.folder / "spool", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    preexec_fn=die_with_the_tests,
                )
            )  # fmt: skip

    def restart_controller(self) -> None:
        """After its end: with the state it saved."""
        command = [str(word) for word in self.daemons[1].args if word != "-c"]  # type: ignore[union-attr]
        with (self.folder / "log" / "slurmctld.out").open("ab") as log:
            self.daemons[1] = subprocess.Popen(
                command, env=self.env, cwd=self.folder / "spool", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_the_tests,
            )  # fmt: skip
        self.wait_for(lambda: "UP" in self.run("scontrol", "ping", check=False), "the controller", within_s=20)

    def _remove_cgroups(self) -> None:
        for number in range(1, self.nodes + 1):
            for root in Path("/sys/fs/cgroup").glob(f"*/slurm_n{number}"):
                folders: Iterable[Path] = [*sorted(root.rglob("*/"), key=lambda path: -len(path.parts)), root]
                for folder in folders:
                    if folder.is_dir():
                        with suppress(OSError):
                            folder.rmdir()


def die_with_the_tests() -> None:
    """In a daemon, before it starts: has the kernel end it when the tests are killed."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that are free on loopback."""
    for base in range(16800 + os.getpid() % 97 * 10, 24000, 20):
        sockets = []
        try:
            for port in range(base, base + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
            return base
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise RuntimeError("no free ports")
