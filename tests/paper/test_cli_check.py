"""The verbs `check` and `doctor` from the command line: answers, exit codes, and what a user gets wrong."""

import json
import subprocess
import sys
from pathlib import Path

DEEPSPEED = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}}
OOM = (
    "step 10 loss 2.1\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the "
    "allocated memory 76.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated.\n"
)


def gatewright(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gatewright", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, check=False)


def test_check_finds_and_explains(tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --time=02:00:00\ntorchrun train.py --output_dir out/$SLURM_JOB_ID --save_steps 500\n"
    )
    done = gatewright("check", str(script), "--json")
    found = json.loads(done.stdout)
    assert done.returncode in (0, 1) and found["findings"]
    code = found["findings"][0]["code"]
    assert code in gatewright("check", "--explain", code).stdout
    ignored = gatewright("check", str(script), "--json", "--ignore", code)
    assert code not in {finding["code"] for finding in json.loads(ignored.stdout)["findings"]}
    assert code in gatewright("check", str(script)).stdout


def test_check_writes_nothing_unless_asked(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(DEEPSPEED))
    before = config.read_bytes()
    gatewright("check", str(config), "--gpu", "mi250x-gcd")
    assert config.read_bytes() == before and list(tmp_path.iterdir()) == [config]


def test_doctor_names_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(OOM)
    done = gatewright("doctor", str(log))
    assert done.returncode == 0 and "memory" in done.stdout and "run.log" in done.stdout
    found = json.loads(gatewright("doctor", "-", "--json", stdin=OOM).stdout)
    assert found["verdict"] == "failed"
    assert found["root"]["code"] in gatewright("doctor", "--explain", found["root"]["code"]).stdout


def test_what_is_missing_is_said_in_one_sentence(tmp_path: Path) -> None:
    for arguments in (
        ["doctor", str(tmp_path / "absent.log")],
        ["check", "--explain", "GW999"],
        ["doctor", "--explain", "GW999"],
        ["check", __file__, "--gpu", "h900"],
        ["check", __file__, "--package", "peft"],
        ["check"],
        ["doctor"],
    ):
        done = gatewright(*arguments)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr + done.stdout, arguments
