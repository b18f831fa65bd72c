"""What is read from a script: launchers, containers, variables, arrays, quotes, here-documents, each with its line."""

import time
from pathlib import Path

import pytest

from gatewright.preflight.gather import Given, gather
from gatewright.preflight.job import Job
from gatewright.preflight.shell import read_script
from gatewright.preflight.source import Source

TRAIN = "sft.py --model_name_or_path Qwen/Qwen3-8B --max_length 2048 --output_dir out"


def read(text: str, folder: Path) -> Job:
    (folder / "job.sh").write_text(text)
    found = gather([folder / "job.sh"], given=Given())
    assert found.unread == []
    return found.job


@pytest.mark.parametrize(
    "command",
    [
        f"python {TRAIN}",
        f"python -u {TRAIN}",
        f"CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone --nproc_per_node 2 {TRAIN}",
        f"srun --ntasks 2 torchrun --nnodes 2 {TRAIN}",
        f"srun singularity exec -B /scratch $SIF torchrun {TRAIN}",
        f'srun singularity exec $SIF bash -c "source env/bin/activate && torchrun {TRAIN}"',
        f"accelerate launch --num_processes 8 --mixed_precision bf16 {TRAIN}",
        f"deepspeed --num_gpus 8 {TRAIN}",
        f"cd /work && python {TRAIN} 2>&1 | tee log",
        f"if true; then python {TRAIN}; fi",
        f"exec numactl --interleave=all python {TRAIN}",
        "ARGS='--max_length 2048'\npython sft.py --model_name_or_path Qwen/Qwen3-8B $ARGS --output_dir out",
        "ARGS=(\n  --max_length 2048  # tokens\n  --output_dir out\n)\n"
        'python sft.py --model_name_or_path Qwen/Qwen3-8B "${ARGS[@]}"',
        "A=--max_length\npython sft.py --model_name_or_path Qwen/Qwen3-8B $A=2048 --output_dir out",
        "python sft.py \\\n  --model_name_or_path Qwen/Qwen3-8B \\\n  --max_length 2048 \\\n  --output_dir out",
        f"cat > x.yaml <<EOF\nmax_length: don't\nEOF\npython {TRAIN}",
        f'echo "a\nb"\npython {TRAIN}',
    ],
)
def test_the_training_command_is_found_behind_whatever_starts_it(command: str, tmp_path: Path) -> None:
    job = read(f"#!/bin/bash\n{command}\n", tmp_path)
    assert job.model.value == "Qwen/Qwen3-8B"
    assert job.max_tokens.value == 2048
    assert job.output_dir.value == "out"


def test_each_word_keeps_the_line_it_was_written_on(tmp_path: Path) -> None:
    job = read(
        "#!/bin/bash\nARGS=(\n  --max_length 2048\n)\n"
        "python sft.py \\\n  --model_name_or_path a \\\n  ${ARGS[@]} --output_dir 'x\ny'\n",
        tmp_path,
    )
    assert (job.max_tokens.line, job.model.line, job.output_dir.line) == (3, 6, 7)


def test_the_queue_is_read_from_long_and_short_options(tmp_path: Path) -> None:
    head = (
        "#SBATCH -N 4 -t 2-12:30:00 -p standard-g\n#SBATCH --gres=gpu:mi250:8\n#SBATCH --mem=480G\n#SBATCH -a 1-6%1\n"
    )
    job = read(f"#!/bin/bash\n{head}", tmp_path)
    assert (job.nodes.value, job.time_limit_s.value) == (4, 2 * 86400 + 12 * 3600 + 30 * 60)
    assert (job.gpus_per_node.value, job.memory_bytes.value, job.array.value) == (8, 480 * 2**30, "1-6%1")
    assert job.gpu is not None and job.gpu.name == "mi250x-gcd"
    assert job.chained


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 5400), ("30:00", 1800), ("24:00:00", 86400), ("2-00", 172800), ("1-12:00", 129600)]
)
def test_slurm_writes_times_in_five_ways(text: str, seconds: int, tmp_path: Path) -> None:
    assert read(f"#!/bin/bash\n#SBATCH --time={text}\n", tmp_path).time_limit_s.value == seconds


def test_the_environment_is_what_is_exported_or_set_before_a_command(tmp_path: Path) -> None:
    job = read("#!/bin/bash\nA=1\nexport B=2 C=$A\nD=4 python train.py\nexport A\n", tmp_path)
    assert {name: said.value for name, said in job.env.items()} == {"B": "2", "C": "1", "D": "4"}


def test_a_dependency_on_another_stage_is_no_chain(tmp_path: Path) -> None:
    assert not read("#!/bin/bash\n#SBATCH --dependency=afterok:12\n", tmp_path).chained
    assert read("#!/bin/bash\n#SBATCH --dependency=singleton\n", tmp_path).chained


@pytest.mark.parametrize("text", ['echo "', "A=(", "x \\", "<<EOF", "'" * 999, "${", "$(((", "\\"])
def test_a_script_cut_off_anywhere_is_read(text: str) -> None:
    read_script(Source(path=Path("x.sh"), name="x.sh", text=f"#!/bin/bash\npython a.py\n{text}"))


def test_a_very_long_line_is_read_in_bounded_time() -> None:
    start = time.perf_counter()
    read_script(Source(path=Path("x.sh"), name="x.sh", text="python a.py " + "--a b " * 40_000 + "# " * 9))
    assert time.perf_counter() - start < 5
