"""The launch scripts for several hosts: what they would run, that they run just that, and what they refuse."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.launcher.runner import EXPORT_ENVS
from train import parse_options

from tests.launch.fakes import BIN, LAUNCH, ROOT, DryRun, FakeCluster

SCRIPTS = ["run_hostfile.sh", "run_mpi.sh", "run_slurm.sbatch"]
TRAIN = f"{LAUNCH}/train.py"
ARGUMENTS = ["--deepspeed_config", "ds.json", "--text", "my text"]
USUAL = {"MASTER_PORT": "29611", "OMP_NUM_THREADS": "2", "TORCH_EXTENSIONS_DIR": "/ext"}
OPEN_MPI = {"MPIRUN": "bin/mpirun"}


@pytest.mark.parametrize("name", [*SCRIPTS, "nodes.sh", "session.sh", "run_local.sh", "cpu_op.sh"])
def test_the_scripts_are_sound(name: str) -> None:
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if shellcheck is not None:
        subprocess.run([shellcheck, "-x", f"launch/{name}"], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_variable(cluster: FakeCluster, script: str) -> None:
    told = cluster.start(script, "--help", ROOT=str(ROOT))
    assert told.returncode == 0
    block = re.compile(r"^([A-Z_]+)=", flags=re.MULTILINE)
    variables = set(block.findall((LAUNCH / script).read_text()))
    assert set(block.findall(told.stdout)) == variables > {"VENV", "MASTER_PORT"}
    assert "--dry_run" in told.stdout
    assert "set -euo" not in told.stdout
    assert "#SBATCH --" not in told.stdout


# Settings of run_hostfile.sh, and the command that they must give; {} stands for the folder.
DEEPSPEED = "{}/venv/bin/deepspeed --hostfile hosts --master_port"
ENV_FILE = "DS_ENV_FILE=FOLDER/deepspeed_env"
HOSTFILE_COMMANDS = [
    ({}, f"env {ENV_FILE} {DEEPSPEED} 29611 --quiet --launcher pdsh --force_multi {TRAIN}"),
    (
        {"MASTER_ADDR": "10.0.0.1", "LAUNCHER_ARGS": "-t 5"},
        f"env {ENV_FILE} {DEEPSPEED} 29611 --quiet --launcher pdsh --force_multi --master_addr 10.0.0.1 "
        f"'--launcher_args=-t 5' {TRAIN}",
    ),
    (
        {"LAUNCHER": "openmpi", "INTERFACE": "ib0", "LAUNCHER_ARGS": "-v"},
        f"env PATH={{}}/bin:{{}}/venv/bin:{{}}/bin:/usr/bin:/bin {ENV_FILE} {DEEPSPEED} 29611 --quiet "
        "--launcher openmpi --force_multi '--launcher_args=--mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0 "
        f"-v' --module mpi4py {TRAIN}",
    ),
    (
        {"LAUNCHER": "no_ssh", "NODE_RANK": "1", "MASTER_PORT": ""},
        f"env {DEEPSPEED} 29500 --quiet --no_ssh --node_rank 1 --master_addr w0 {TRAIN}",
    ),
    (
        {"LAUNCHER": "no_ssh", "SLURM_NODEID": "0", "MASTER_ADDR": "n01"},
        f"env {DEEPSPEED} 29611 --quiet --no_ssh --node_rank 0 --master_addr n01 {TRAIN}",
    ),
]


@pytest.mark.parametrize(("settings", "expected"), HOSTFILE_COMMANDS)
def test_run_hostfile_runs_what_it_shows(cluster: FakeCluster, settings: dict[str, str], expected: str) -> None:
    output = cluster.start("run_hostfile.sh", "--dry_run", *ARGUMENTS, **settings)
    assert (output.returncode, output.stderr) == (0, "")
    assert not cluster.records()
    dry = DryRun.parse(output.stdout)
    (command,) = dry.commands
    assert command == [*shlex.split(expected.replace("{}", str(cluster.folder))), *ARGUMENTS]

    assert cluster.start("run_hostfile.sh", *ARGUMENTS, **settings).returncode == 0
    (record,) = cluster.records()
    assert record["argv"] == command[command.index(f"{cluster.venv}/bin/deepspeed") :]
    if settings.get("LAUNCHER") == "no_ssh":
        assert dry.environment.items() <= record["env"].items()
    else:
        assert record["env_file"].splitlines() == dry.lines("the environment of the ranks")
        assert not Path(record["env"]["DS_ENV_FILE"]).exists()


# Settings of run_mpi.sh, and the options of mpirun that they must give; {x} stands for "-x NAME" of each variable.
MPI_COMMANDS = [
    ({**OPEN_MPI, "HOSTFILE": "", "NUM_RANKS": "9"}, "-np 9 --bind-to none --map-by slot --host localhost:9 {x}"),
    (OPEN_MPI, "-np 3 --bind-to none --map-by slot --hostfile hosts {x}"),
    (
        {**OPEN_MPI, "NUM_RANKS": "2", "INTERFACE": "ib0", "MPIRUN_ARGS": "--tag-output -v"},
        "-np 2 --bind-to none --map-by slot --hostfile hosts --mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0 "
        "-x GLOO_SOCKET_IFNAME {x} --tag-output -v",
    ),
    ({"HOSTFILE": "", "NUM_RANKS": "9"}, "-n 9 -genvlist {list}"),
    ({"INTERFACE": "ib0"}, "-n 3 -genvlist GLOO_SOCKET_IFNAME,{list} -f FOLDER/hosts -iface ib0"),
]


@pytest.mark.parametrize(("settings", "expected"), MPI_COMMANDS)
def test_run_mpi_runs_what_it_shows(cluster: FakeCluster, settings: dict[str, str], expected: str) -> None:
    is_open_mpi = "MPIRUN" in settings
    if is_open_mpi:
        settings = {**settings, "MPIRUN": f"{cluster.folder}/{settings['MPIRUN']}"}
    output = cluster.start("run_mpi.sh", "--dry_run", *ARGUMENTS, **settings, PYTHONPATH="/mine", RANK="0")
    assert (output.returncode, output.stderr) == (0, "")
    assert not cluster.records()
    dry = DryRun.parse(output.stdout)
    ib0 = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"} if "INTERFACE" in settings else {}
    assert dry.environment == {
        **USUAL,
        **ib0,
        "PYTHONPATH": "/mine",
        "PATH": f"{cluster.venv}/bin:{cluster.bin}:/usr/bin:/bin",
        "MPI4PY_LIBMPI": f"{cluster.folder}/lib:libmpi.so.40" if is_open_mpi else f"{cluster.venv}/lib:libmpi.so.12",
    }
    names = sorted(dry.environment.keys() - {"GLOO_SOCKET_IFNAME"})
    options = expected.format(x=" ".join(f"-x {name}" for name in names), list=",".join(names))
    program = [f"{cluster.venv}/bin/python", "-u", "-m", "mpi4py", TRAIN, *ARGUMENTS]
    mpirun = f"{cluster.bin if is_open_mpi else cluster.venv / 'bin'}/mpirun"
    (command,) = dry.commands
    assert command == [mpirun, *options.split(), *program]

    assert cluster.start("run_mpi.sh", *ARGUMENTS, **settings, PYTHONPATH="/mine", RANK="0").returncode == 0
    (record,) = cluster.records()
    argv = record["argv"][1:]
    if "-f" in argv:
        assert record["hosts"].splitlines() == ["w0:2", "w1:1"] == dry.lines("FOLDER/hosts")
        argv[argv.index("-f") + 1] = "FOLDER/hosts"
    assert argv == command[1:]
    assert dry.environment.items() <= record["env"].items()
    assert "RANK" not in record["env"]


def test_the_ranks_get_what_is_set_and_named(cluster: FakeCluster) -> None:
    given = {"NCCL_DEBUG": "INFO", "DS_ACCELERATOR": "cuda", "WANDB_MODE": "offline"}
    output = cluster.start(
        "run_hostfile.sh", "--dry_run", **given, EXPORT_VARS="WANDB_MODE", INTERFACE="ib0", HF_TOKEN="secret"
    )
    assert DryRun.parse(output.stdout).environment == {
        **USUAL,
        **given,
        "PATH": f"{cluster.venv}/bin:{cluster.bin}:/usr/bin:/bin",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
    }


@pytest.mark.parametrize(("hosts", "threads"), [("w0 slots=2\nw1 slots=1\n", "3"), ("w0 slots=8\n", "1")])
def test_threads_are_the_seven_cores_over_the_ranks_of_a_host(cluster: FakeCluster, hosts: str, threads: str) -> None:
    (cluster.folder / "hosts").write_text(hosts)
    for script in ("run_hostfile.sh", "run_mpi.sh"):
        output = cluster.start(script, "--dry_run", OMP_NUM_THREADS="")
        assert DryRun.parse(output.stdout).environment["OMP_NUM_THREADS"] == threads


def test_the_user_s_environment_files_are_kept_and_count_more(cluster: FakeCluster) -> None:
    texts = {"home/.deepspeed_env": "# mine\n\nA=home\nB=home\n", ".deepspeed_env": " B = here=1\nPATH=/mine"}
    for name, text in texts.items():
        (cluster.folder / name).write_text(text)
    assert cluster.start("run_hostfile.sh").returncode == 0
    assert cluster.records()[0]["env_file"].splitlines()[-3:] == ["A=home", "B=here=1", "PATH=/mine"]
    assert {name: (cluster.folder / name).read_text() for name in texts} == texts

    (cluster.folder / "other").write_text("C=1\n")
    for name in ("other", f"{cluster.folder}/other"):
        dry = DryRun.parse(cluster.start("run_hostfile.sh", "--dry_run", DS_ENV_FILE=name).stdout)
        assert dry.environment["C"] == "1"
        assert not {"A", "B"} & dry.environment.keys()


SLURM = {"SLURM_JOB_NODELIST": "n[01-02]", "SLURM_JOB_ID": "7", "ROOT": str(ROOT), "HOSTFILE": "", "SLOTS": "4"}
SLURM_HOSTS = ["n01 slots=4", "n02 slots=4"]


def test_slurm_starts_a_task_on_each_node(cluster: FakeCluster) -> None:
    settings = {**SLURM, "SLOTS": "", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "32", "NODE_RANK": "5"}
    srun = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=1 --cpus-per-task=32"
    output = cluster.start("run_slurm.sbatch", "--dry_run", *ARGUMENTS, **settings)
    assert (output.returncode, output.stderr) == (0, "")
    assert not cluster.records()
    dry = DryRun.parse(output.stdout)
    task, first = dry.commands
    assert task == ["srun", *srun.split(), f"{LAUNCH}/run_hostfile.sh", *ARGUMENTS]
    assert dry.sections[0][1] == SLURM_HOSTS

    assert cluster.start("run_slurm.sbatch", *ARGUMENTS, **settings).returncode == 0
    assert (cluster.folder / "record.srun").read_text().split() == [*task[1:-1], "my", "text"]
    records = cluster.records()
    words = "--master_port 29611 --quiet --no_ssh --node_rank {} --master_addr n01 " + TRAIN
    assert [record["argv"][3:] for record in records] == [[*words.format(i).split(), *ARGUMENTS] for i in range(2)]
    assert [record["hosts"].splitlines() for record in records] == [SLURM_HOSTS] * 2
    assert first[4:] == records[0]["argv"][3:]
    assert not list(cluster.folder.glob(".hosts-*"))


def test_slurm_over_ssh_starts_on_the_first_node(cluster: FakeCluster) -> None:
    assert cluster.start("run_slurm.sbatch", *ARGUMENTS, **SLURM, LAUNCHER="pdsh").returncode == 0
    (record,) = cluster.records()
    words = f"--master_port 29611 --quiet --launcher pdsh --force_multi --master_addr n01 {TRAIN}"
    assert record["argv"][3:] == [*words.split(), *ARGUMENTS]
    assert record["hosts"].splitlines() == SLURM_HOSTS


def pod(job: dict[str, Any], kind: str) -> dict[str, Any]:
    (container,) = job["spec"]["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"]
    return container


def test_the_kubernetes_job_starts_run_mpi_on_all_slots(cluster: FakeCluster) -> None:
    job = yaml.safe_load((LAUNCH / "k8s_mpijob.yaml").read_text())
    spec, launcher, worker = job["spec"], pod(job, "Launcher"), pod(job, "Worker")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert spec["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1
    assert spec["slotsPerWorker"] == worker["resources"]["limits"]["nvidia.com/gpu"]
    assert launcher["image"] == worker["image"]
    assert worker["volumeMounts"][0]["mountPath"] == "/dev/shm"
    (command,) = launcher["command"]
    assert (ROOT / Path(command).relative_to(launcher["workingDir"])) == LAUNCH / "run_mpi.sh"
    assert (ROOT / parse_options(launcher["args"]).deepspeed_config).is_file()

    environment = {setting["name"]: setting["value"] for setting in launcher["env"]}
    assert (environment["HOSTFILE"], environment["MPIRUN"]) == ("/etc/mpi/hostfile", "/usr/bin/mpirun")
    # As the operator writes it for Open MPI.
    hosts = [f"ds-hybrid-worker-{place}.ds-hybrid.default.svc slots={spec['slotsPerWorker']}" for place in range(2)]
    (cluster.folder / "hosts").write_text("\n".join(hosts) + "\n")
    settings = {**environment, "HOSTFILE": "hosts", "MPIRUN": f"{cluster.bin}/mpirun"}
    dry = DryRun.parse(cluster.start("run_mpi.sh", "--dry_run", *launcher["args"], **settings).stdout)
    (words,) = dry.commands
    assert words[1:11] == [
        "-np",
        "16",
        "--bind-to",
        "none",
        "--map-by",
        "slot",
        "--hostfile",
        "hosts",
        "--mca",
        "btl_tcp_if_include",
    ]
    assert words[-len(launcher["args"]) - 1 :] == [TRAIN, *launcher["args"]]
    assert {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"}.items() <= (
        dry.environment.items()
    )


OPENMPI = {"LAUNCHER": "openmpi"}
MISTAKES = [
    ("run_hostfile.sh", {"HOSTFILE": "missing"}, "HOSTFILE = missing: no such file. Write one line for each host, "),
    ("run_hostfile.sh", {"LAUNCHER": "pssh"}, "LAUNCHER = pssh: must be pdsh, openmpi or no_ssh."),
    ("run_hostfile.sh", {"LAUNCHER": "no_ssh"}, "NODE_RANK = : must be this host's place in hosts, 0 to 1. Start this"),
    ("run_hostfile.sh", {"LAUNCHER": "no_ssh", "NODE_RANK": "2"}, "NODE_RANK = 2: must be this host's place in hosts"),
    ("run_hostfile.sh", {"VENV": "/none"}, "VENV = /none: no bin/deepspeed there. Run launch/setup.sh, or name the"),
    ("run_hostfile.sh", {"SCRIPT": "/none.py"}, "SCRIPT = /none.py: no such file. Give the Python script that each"),
    ("run_hostfile.sh", {"EXPORT_VARS": "NO"}, "EXPORT_VARS names NO, which is not set. Set it, or leave it out."),
    ("run_hostfile.sh", {"NCCL_X": "a\nb"}, "NCCL_X holds a line break, which cannot be handed on. Unset it."),
    ("run_hostfile.sh", {"NCCL_X": "a$b"}, 'NCCL_X = a$b: the shells of the hosts would change it. Leave out ", $, `'),
    ("run_hostfile.sh", {"NCCL_X": "a b", **OPENMPI}, "NCCL_X = a b: would arrive with quotes around it. Use letters,"),
    ("run_hostfile.sh", {"SCRIPT": "a b.py"}, "'a b.py': pdsh takes no path with blanks. Move it, or use LAUNCHER="),
    (
        "run_hostfile.sh",
        {"NCCL_X": "a%nb"},
        "NCCL_X = a%nb: pdsh would change it, as it rewrites %h, %n, %u and %%. Leave",
    ),
    (
        "run_hostfile.sh",
        {"PYTHONX": "a%hb"},
        "PYTHONX = a%hb: pdsh would change it, as it rewrites %h, %n, %u and %%. Leave",
    ),
    (
        "run_hostfile.sh",
        {"PYTHONX": "$(a)"},
        'PYTHONX = $(a): the shells of the hosts would change it. Leave out ", $, `',
    ),
    (
        "run_hostfile.sh",
        {"DS_ENV_FILE": "percent"},
        "MINE = %u: pdsh would change it, as it rewrites %h, %n, %u and %%.",
    ),
    (
        "run_hostfile.sh",
        {"MASTER_PORT": "0 .*"},
        "MASTER_PORT = 0 .*: must be a whole number from 1 to 65535. Leave it",
    ),
    (
        "run_hostfile.sh",
        {"MASTER_PORT": "70000"},
        "MASTER_PORT = 70000: must be a whole number from 1 to 65535. Leave it",
    ),
    ("run_mpi.sh", {"MASTER_PORT": "29500'"}, "MASTER_PORT = 29500': must be a whole number from 1 to 65535. Leave it"),
    ("run_mpi.sh", {"HOSTFILE": "missing"}, "HOSTFILE = missing: no such file. Write one line for each host, "),
    ("run_mpi.sh", {"HOSTFILE": ""}, "NUM_RANKS = : must be a whole number of at least 1, unless there is a HOSTFILE."),
    ("run_mpi.sh", {"NUM_RANKS": "4"}, "NUM_RANKS = 4: hosts has 3 slots. Give it more, or run fewer ranks."),
    ("run_mpi.sh", {"MPIRUN": "none"}, "MPIRUN = none: not found. Install Open MPI or MPICH (pip install mpich), or "),
    ("run_mpi.sh", {"MPIRUN": "ls"}, "MPIRUN = /usr/bin/ls: not Open MPI's, not MPICH's, it says 'ls (GNU coreutils)"),
    ("run_slurm.sbatch", {"ROOT": "/none"}, "ROOT = /none: not the repository of ds_hybrid. Submit from its root, or"),
    ("run_slurm.sbatch", {"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set: this is no Slurm job. Start it"),
    ("run_slurm.sbatch", {"SLURM_JOB_NODELIST": "x"}, "'scontrol show hostnames x' failed. Start it where Slurm's com"),
    ("run_slurm.sbatch", {"SLOTS": ""}, "SLOTS = : must be the number of ranks of each node. Set it, or ask for GPUs:"),
    ("run_slurm.sbatch", {"LAUNCHER": "mpi"}, "LAUNCHER = mpi: must be srun, pdsh or openmpi."),
]


@pytest.mark.parametrize(("script", "settings", "message"), MISTAKES)
def test_a_mistake_is_told_and_nothing_runs(
    cluster: FakeCluster, script: str, settings: dict[str, str], message: str
) -> None:
    (cluster.folder / "percent").write_text("MINE=%u\n")
    (cluster.folder / "a b.py").touch()
    slurm = SLURM if script == "run_slurm.sbatch" else {}
    told = cluster.start(script, **{**slurm, **settings})
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith(f"launch/{script}: {message}")
    assert not cluster.records()


def test_wrong_lines_of_an_environment_file_are_told(cluster: FakeCluster) -> None:
    """In the words of ds_hybrid doctor, which reads it the same way."""
    (cluster.folder / "bad").write_text("A=1\n# fine here\nexport A\n\n1B=2\n")
    told = cluster.start("run_hostfile.sh", DS_ENV_FILE="bad")
    rule = "must be NAME=VALUE: DeepSpeed fails there, or hands it on as nonsense. Mend or remove it."
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.splitlines() == [f'line 3 = "export A" (bad): {rule}', f'line 5 = "1B=2" (bad): {rule}']
    assert not cluster.records()


@pytest.mark.parametrize("argument", ["%n", "a%h", "%u%m", "a%%b"])
def test_pdsh_refuses_an_argument_that_it_would_rewrite(cluster: FakeCluster, argument: str) -> None:
    told = cluster.start("run_hostfile.sh", argument)
    assert told.returncode == 2
    assert told.stderr == (
        f"launch/run_hostfile.sh: '{argument}': pdsh would change it, as it rewrites %h, %n, %u and %%. "
        "Leave them out, or use LAUNCHER=openmpi.\n"
    )
    assert not cluster.records()
    assert cluster.start("run_hostfile.sh", argument, LAUNCHER="openmpi", INTERFACE="ib0").returncode == 0
    assert cluster.records()[0]["argv"][-1] == argument


def test_pdsh_itself_rewrites_just_that(cluster: FakeCluster) -> None:
    """The real one, over an ssh that tells what it is to run."""
    (cluster.bin / "pdsh").unlink()
    pdsh = shutil.which("pdsh")
    if pdsh is None:
        pytest.skip("no pdsh on PATH")
    cluster.program("bin/ssh", '#!/bin/sh\nfor word; do :; done; echo "$word"\n')
    environment = {**cluster.environment(), "PDSH_RCMD_TYPE": "ssh"}
    done = subprocess.run(
        [pdsh, "-w", "w0", "%h %n %% %m %Y 100%"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "w0: w0 0 % %m %Y 100%\n"
    assert cluster.start("run_hostfile.sh", "--dry_run", "%m%Y", "100%").returncode == 0


def test_deepspeed_hands_on_what_run_hostfile_checks() -> None:
    assert EXPORT_ENVS == ["MLFLOW", "PYTHON", "MV2", "UCX"]
    assert "'^(MLFLOW|PYTHON|MV2|UCX)'" in (LAUNCH / "run_hostfile.sh").read_text()


@pytest.mark.parametrize("argument", ["", "$HOME", "*.json", "it's", "a;b", "{x}", "a\nb", "a\tb"])
def test_pdsh_refuses_an_argument_that_the_hosts_would_change(cluster: FakeCluster, argument: str) -> None:
    told = cluster.start("run_hostfile.sh", argument)
    assert told.returncode == 2
    assert f"'{argument}': the shells of the hosts would change it. Use plain characters" in told.stderr
    assert cluster.start("run_hostfile.sh", argument, LAUNCHER="openmpi", INTERFACE="ib0").returncode == 0


@pytest.mark.parametrize("script", ["run_hostfile.sh", "run_mpi.sh"])
def test_a_broken_hostfile_is_told_line_by_line(cluster: FakeCluster, script: str) -> None:
    (cluster.folder / "hosts").write_text("w0:4\nw1 slots=0\n")
    told = cluster.start(script)
    assert (told.returncode, len(told.stderr.splitlines())) == (2, 2)
    assert "line 1" in told.stderr
    assert "line 2" in told.stderr
    assert not cluster.records()


@pytest.mark.parametrize(
    ("settings", "missing", "message"),
    [({}, "pdsh", "LAUNCHER = pdsh: no pdsh on PATH. Install it"), (OPENMPI, "ompi_info", "no ompi_info on PATH")],
)
def test_a_missing_program_is_told(cluster: FakeCluster, settings: dict[str, str], missing: str, message: str) -> None:
    (cluster.bin / missing).unlink()
    others = cluster.folder / "others"
    others.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name != missing:
            (others / program.name).symlink_to(program)
    path = {"PATH": f"{cluster.bin}:{others}"}
    assert cluster.start("run_hostfile.sh", "--dry_run", **settings, **path).returncode == 0
    told = cluster.start("run_hostfile.sh", **settings, **path)
    assert told.returncode == 2
    assert message in told.stderr
