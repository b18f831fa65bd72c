"""The verdict: what is selected, ignored, repaired and printed, and what bad input does."""

import json
import os
import random
import time
from pathlib import Path

import pytest
from preflight_case import codes, verdict
from preflight_texts import MOE, axolotl, deepspeed, factory, ours, sbatch, trl

from gatewright.preflight.catalogue import FAMILIES, RULES, find_rule
from gatewright.preflight.check import check
from gatewright.preflight.fault import Edit
from gatewright.preflight.fix import apply_safe, diffs, edited, safe_repairs
from gatewright.preflight.gather import MAX_FILES, Given, gather
from gatewright.preflight.job import Written
from gatewright.preflight.output import as_github, as_json, as_sarif, render_text
from gatewright.preflight.pages import index, page
from gatewright.preflight.source import MAX_BYTES, Source
from gatewright.spec.errors import UserError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "check.txt"
BROKEN = [
    axolotl(
        base_model=MOE, adapter="lora", lora_r=12, lora_dropout=0.05, lora_target_parameters=["mlp.experts.down_proj"]
    ),
    sbatch(
        "--partition=standard-g --nodes=2 --ntasks-per-node=8 --cpus-per-task=8 --gpus-per-node=8 --requeue",
        "export NCCL_SOCKET_IFNAME=hsn0",
        "srun torchrun --nproc_per_node 4 -m axolotl.cli.train axolotl.yaml",
    ),
]


# --- the verdict ------------------------------------------------------------------------------------------------


def test_several_files_are_judged_together_whatever_their_order(tmp_path: Path) -> None:
    forward = verdict(BROKEN, tmp_path / "a", {"step_s": 60.0})
    backward = verdict(BROKEN[::-1], tmp_path / "a", {"step_s": 60.0})
    assert sorted(codes(forward)) == sorted(codes(backward))
    assert {"GW304", "GW708", "GW711", "GW755"} <= set(codes(forward))


def test_a_script_brings_the_files_it_names(tmp_path: Path) -> None:
    for name, text in (axolotl(deepspeed="configs/ds.json"), deepspeed(3)):
        (tmp_path / name).write_text(text)
    (tmp_path / "configs").mkdir()
    (tmp_path / "ds.json").rename(tmp_path / "configs" / "ds.json")
    name, text = sbatch("--nodes=1", "axolotl train axolotl.yaml")
    (tmp_path / name).write_text(text)
    found = gather([tmp_path / name], given=Given())
    assert found.job.tools == {"sbatch", "axolotl", "deepspeed"}
    assert (found.job.zero.value, found.job.zero.file) == (3, str(tmp_path / "configs/ds.json"))
    assert found.job.max_tokens.value == 4096


def test_every_value_carries_its_key_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# axolotl\nbase_model: Qwen/Qwen3-8B\n\nsequence_len: 2_048\n")
    said = gather([tmp_path / "a.yaml"], given=Given()).job.max_tokens
    assert (said.value, said.key, said.line, said.default) == (2048, "sequence_len", 4, False)


def test_findings_come_worst_first_and_set_the_exit_code(tmp_path: Path) -> None:
    found = verdict(BROKEN, tmp_path, {})
    severities = [finding.severity for finding in found.findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert found.exit_code == 1
    assert verdict([axolotl(pad_to_sequence_len=True)], tmp_path / "b", {}).exit_code == 0


def test_select_and_ignore_take_codes_beginnings_and_names(tmp_path: Path) -> None:
    assert {code[:3] for code in codes(verdict(BROKEN, tmp_path, {}, select=["GW7"]))} == {"GW7"}
    assert codes(verdict(BROKEN, tmp_path, {}, select=["GW304"])) == ["GW304"]
    assert codes(verdict(BROKEN, tmp_path, {}, select=["dropout-on-target-parameters"])) == ["GW304"]
    assert "GW304" not in codes(verdict(BROKEN, tmp_path, {}, ignore=["gw30"]))
    with pytest.raises(UserError, match="did you mean"):
        check([tmp_path / "axolotl.yaml"], select=["dropout-on-target-parameter"])
    with pytest.raises(UserError, match="No GPU is called"):
        check([tmp_path / "axolotl.yaml"], given=Given(gpu="h2000x"))


@pytest.mark.parametrize(
    ("comment", "kept"),
    [
        ("# gatewright: ignore[GW304]", False),
        ("# gatewright: ignore[dropout-on-target-parameters, GW2]", False),
        ("# gatewright: ignore", False),
        ("# gatewright: ignore[GW305]", True),
    ],
)
def test_a_comment_on_the_line_ignores_a_finding(comment: str, kept: bool, tmp_path: Path) -> None:
    name, text = BROKEN[0]
    text = text.replace("lora_dropout: 0.05", f"lora_dropout: 0.05  {comment}")
    found = verdict([(name, text)], tmp_path, {})
    assert ("GW304" in codes(found)) == kept
    assert found.ignored == (0 if kept else 1)


def test_a_comment_on_a_line_of_its_own_holds_for_the_file(tmp_path: Path) -> None:
    name, text = BROKEN[0]
    assert "GW304" not in codes(verdict([(name, f"# gatewright: ignore[GW304]\n{text}")], tmp_path, {}))


def test_what_is_not_understood_is_listed_and_not_guessed(tmp_path: Path) -> None:
    found = verdict([axolotl(sequence_len="long", flux_capacitor=3)], tmp_path, {})
    assert {(unread.key, unread.line) for unread in found.unread} == {("sequence_len", 2), ("flux_capacitor", 5)}
    assert "wanted a whole number" in str(found.unread[0])
    assert gather([tmp_path / "axolotl.yaml"], given=Given()).job.max_tokens.value is None


def test_our_own_run_file_is_judged_too(tmp_path: Path) -> None:
    assert verdict([ours()], tmp_path, {}).exit_code == 0
    assert "GW361" in codes(verdict([ours(router={"train": True})], tmp_path, {}))


# --- repairs ----------------------------------------------------------------------------------------------------


def test_safe_repairs_mend_the_files_and_keep_a_copy(tmp_path: Path) -> None:
    before = verdict(BROKEN, tmp_path, {})
    originals = dict(BROKEN)
    wanted = {repair.code for repair in safe_repairs(before)}
    assert {"GW304", "GW702", "GW719", "GW755"} <= wanted
    changed = apply_safe(before)
    assert {Path(name).name for name, _ in changed} == {"axolotl.yaml", "job.sbatch"}
    for name, copy in changed:
        assert copy.read_text() == originals[Path(name).name]
    after = check([tmp_path / name for name, _ in BROKEN])
    assert not wanted & set(codes(after))
    assert "lora_dropout: 0\n" in (tmp_path / "axolotl.yaml").read_text()
    assert "#SBATCH --cpus-per-task=7\n" in (tmp_path / "job.sbatch").read_text()
    assert "#SBATCH --open-mode=append\n#SBATCH --requeue\n" in (tmp_path / "job.sbatch").read_text()
    assert apply_safe(after) == []


def test_a_repair_never_touches_a_file_that_changed_since_it_was_read(tmp_path: Path) -> None:
    before = verdict(BROKEN[:1], tmp_path, {})
    (tmp_path / "axolotl.yaml").write_text("base_model: other\n")
    with pytest.raises(UserError, match="has changed"):
        apply_safe(before)
    assert (tmp_path / "axolotl.yaml").read_text() == "base_model: other\n"


def test_a_second_copy_does_not_overwrite_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        apply_safe(verdict(BROKEN[:1], tmp_path, {}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "axolotl.yaml",
        "axolotl.yaml.orig",
        "axolotl.yaml.orig.1",
    ]


def test_a_diff_is_unified_and_of_the_users_own_file(tmp_path: Path) -> None:
    found = verdict([factory(overwrite_output_dir=True), sbatch("--requeue --open-mode=append")], tmp_path, {})
    (text,) = diffs(found, [repair for repair in found.repairs if repair.code == "GW210"]).values()
    assert text.splitlines()[0].endswith("factory.yaml")
    assert "-overwrite_output_dir: true\n+overwrite_output_dir: false\n" in text


@pytest.mark.parametrize(
    ("line", "key", "new", "wanted"),
    [
        ("  lora_dropout: 0.05  # small", "lora_dropout", "0", "  lora_dropout: 0  # small"),
        ('  "stage": 3,', "zero_optimization.stage", "2", '  "stage": 2,'),
        ('{"a": 1, "stage": 3}', "stage", "2", '{"a": 1, "stage": 2}'),
        ("python x.py --save_steps 500 --bf16", "save_steps", "100", "python x.py --save_steps 100 --bf16"),
        ("    --save-interval=500 \\", "save_interval", "100", "    --save-interval=100 \\"),
        ("export MASTER_PORT=29500", "MASTER_PORT", "1", "export MASTER_PORT=1"),
        ("#SBATCH -t 3-00:00:00", "--time", "48:00:00", "#SBATCH -t 48:00:00"),
        ("pip install peft==0.19.1 trl", "peft==", "0.20.0", "pip install peft==0.20.0 trl"),
        ("output_dir: 'a b'", "output_dir", "run", "output_dir: 'run'"),
        ("{output_dir: out/${SLURM_JOB_ID}}", "output_dir", "out", "{output_dir: out}"),
    ],
)
def test_a_value_is_replaced_wherever_the_tools_write_it(line: str, key: str, new: str, wanted: str) -> None:
    source = Source(path=Path("x"), name="x", text=line)
    assert edited(source, [Edit("set", Written("", key, "x", 1), new)]) == wanted


def test_a_long_line_is_shown_where_it_changes(tmp_path: Path) -> None:
    config = {"bf16": {"enabled": True}, "note": "x" * 100, "zero_optimization": {"overlap_comm": True, "stage": 3}}
    found = verdict(
        [axolotl(micro_batch_size=2), ("ds.json", json.dumps(config | {"train_micro_batch_size_per_gpu": 4}))],
        tmp_path,
        {},
    )
    removed, added = [line for line in render_text(found).splitlines() if "train_micro_batch_size_per_gpu" in line][1:3]
    assert removed.startswith("    -…") and removed.endswith(": 4}")
    assert added.startswith("    +…") and added.endswith(': "auto"}')


# --- text that leaves the house ---------------------------------------------------------------------------------


def test_the_printed_verdict_is_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in BROKEN:
        Path(name).write_text(text)
    text = render_text(check([name for name, _ in BROKEN], given=Given(gpu="mi250x-gcd", step_s=60.0)))
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 100


def test_json_carries_every_finding_and_every_diff(tmp_path: Path) -> None:
    found = verdict(BROKEN, tmp_path, {})
    read = json.loads(as_json(found))
    assert [finding["code"] for finding in read["findings"]] == codes(found)
    assert read["exit_code"] == 1
    assert set(read["safe_diffs"]) == {str(tmp_path / name) for name, _ in BROKEN}


def test_sarif_names_each_rule_once_and_each_place(tmp_path: Path) -> None:
    found = verdict(BROKEN, tmp_path, {})
    (run,) = json.loads(as_sarif(found))["runs"]
    assert len({rule["id"] for rule in run["tool"]["driver"]["rules"]}) == len(RULES)
    assert [result["ruleId"] for result in run["results"]] == codes(found)
    assert all(result["level"] in ("error", "warning", "note") for result in run["results"])


def test_github_annotations_are_one_line_each(tmp_path: Path) -> None:
    found = verdict([*BROKEN, ours(train={"stepz": 1, "lrr": 2})], tmp_path, {})
    lines = as_github(found).splitlines()
    assert len(lines) == len(found.findings)
    assert all(line.startswith(("::error ", "::warning ", "::notice ")) for line in lines)
    assert any("%0A" in line for line in lines)


def test_the_pages_in_the_docs_are_those_of_the_rules() -> None:
    folder = ROOT / "docs" / "rules"
    assert (folder / "README.md").read_text(encoding="utf-8") == index()
    assert {path.stem for path in folder.glob("GW*.md")} == {rule.code for rule in RULES}
    for rule in RULES:
        assert (folder / f"{rule.code}.md").read_text(encoding="utf-8") == page(rule)


def test_rules_have_codes_of_their_own_a_reason_and_a_source() -> None:
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    assert [rule.code for rule in RULES if len(rule.reason) < 40 or not rule.source] == []
    assert all(find_rule(rule.name) is rule and find_rule(rule.code.lower()) is rule for rule in RULES)
    assert len(RULES) == sum(len(rules) for _, rules in FAMILIES) >= 100


# --- bad input --------------------------------------------------------------------------------------------------

BAD = {
    "empty.yaml": b"",
    "blank.yaml": b" \n\n",
    "binary.yaml": bytes(range(256)) * 40,
    "zeros.json": b"\0" * 5000,
    "utf16.yaml": "base_model: x\n".encode("utf-16"),
    "latin1.yaml": "base_model: café\n".encode("latin-1"),
    "deep.yaml": b"base_model: " + b"[" * 10_000,
    "deep.json": b'{"zero_optimization": ' + b"[" * 10_000,
    "deep_closed.json": b'{"zero_optimization": ' + b'{"a": ' * 10_000 + b"1" + b"}" * 10_001,
    "bomb.yaml": b"a: &a [x, x]\nb: &b [*a, *a]\nbase_model: [*b, *b]\n",
    "tag.yaml": b"base_model: !!python/object/apply:os.system [id]\n",
    "large.yaml": b"base_model: x\n" + b"# " + b"x" * MAX_BYTES,
    "list.yaml": b"- 1\n- 2\n",
    "scalar.yaml": b"hello\n",
    "unknown.yaml": b"colour: blue\n",
    "half.json": b'{"zero_optimization": {"stage": ',
    "comma.json": b'{"zero_optimization": {"stage": 3},,}',
    "digits.json": b'{"zero_optimization": {"stage": ' + b"9" * 5000 + b"}}",
    "quote.yaml": b'base_model: "x\n',
    "documents.yaml": b"base_model: x\n---\nbase_model: y\n",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_finding_with_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(BAD[name])
    start = time.perf_counter()
    found = check([path])
    assert time.perf_counter() - start < 2
    assert codes(found) == ["GW001"]
    assert str(path) in found.findings[0].text
    assert len(render_text(found)) < 2000


def test_a_folder_and_a_missing_file_are_findings(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder").mkdir()
    names = ["none.yaml", "loop.yaml", "pipe.yaml", "folder", "x" * 5000, "\0"]
    found = check([tmp_path / name for name in names])
    assert codes(found) == ["GW001"] * len(names)
    assert found.exit_code == 1


def test_a_script_that_doubles_its_variables_stays_small(tmp_path: Path) -> None:
    lines = ["A='--x --x --x --x'"] + [
        f'{b}="${a} ${a} ${a} ${a}"' for a, b in zip("ABCDEFGHIJKLM", "BCDEFGHIJKLMN", strict=True)
    ]
    lines += [f"{b}=(${a} ${a} ${a} ${a})" for a, b in zip("NOPQRST", "OPQRSTU", strict=True)] + [
        "python train.py $U"
    ] * 9
    start = time.perf_counter()
    verdict([("bomb.sh", "#!/bin/bash\n" + "\n".join(lines))], tmp_path, {})
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("keys.yaml", "base_model: x\n" + "".join(f"k{number}: 1\n" for number in range(20_000))),
        ("items.yaml", "base_model: x\nlist: [" + "{a: 1}," * 30_000 + "]\n"),
        ("numbers.json", '{"zero_optimization": {"stage": 2}, "x": [' + "1," * 120_000 + "1]}"),
        ("exports.sh", "#!/bin/bash\n" + "export A=1\n" * 20_000),
        ("quotes.sh", "#!/bin/bash\n" + 'x "\n' * 50_000),
    ],
)
def test_a_file_of_the_largest_size_is_read_in_seconds(name: str, text: str, tmp_path: Path) -> None:
    start = time.process_time()
    found = verdict([(name, text)], tmp_path, {})
    assert found.exit_code == 0
    assert len(render_text(found)) < 5000
    assert time.process_time() - start < 6


def test_files_that_name_each_other_end(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 20):
        (tmp_path / f"{number}.sh").write_text(f"#!/bin/bash\naxolotl train {number + 1}.sh.yaml\n")
        (tmp_path / f"{number + 1}.sh.yaml").write_text(f"#!/bin/bash\naxolotl train {number + 2}.sh.yaml\n")
    assert len(gather([tmp_path / "0.sh"], given=Given()).sources) <= MAX_FILES


def test_mutated_files_neither_crash_nor_hang(tmp_path: Path) -> None:
    """Every reader and every rule, on files that were cut, doubled, and had their values exchanged. FUZZ=10000 says how
    many; the number here keeps the test short."""
    seeds = sorted((Path(__file__).parent / "foreign_configs").glob("*/*"))
    texts = {path: path.read_text() for path in seeds}
    values = [
        "",
        "null",
        "true",
        "-1",
        "1e309",
        "[",
        "{",
        "'",
        '"',
        "9" * 40,
        "$A",
        "{{",
        "\t",
        "é",
        "0",
        "auto",
        "x" * 300,
        "--a",
    ]
    roll = random.Random(7)
    for count in range(int(os.environ.get("FUZZ", "400"))):
        path = seeds[count % len(seeds)]
        text = texts[path]
        for _ in range(roll.randint(1, 3)):
            at = roll.randrange(len(text) + 1)
            kind = roll.randrange(4)
            if kind == 0:
                text = text[:at] + roll.choice(values) + text[at:]
            elif kind == 1:
                text = text[:at] + text[at + roll.randrange(40) :]
            elif kind == 2:
                lines = text.split("\n")
                lines.insert(roll.randrange(len(lines)), roll.choice(lines))
                text = "\n".join(lines)
            else:
                text = text.replace(roll.choice(text.split() or ["x"]), roll.choice(values), 1)
        target = tmp_path / path.name
        target.write_text(text, encoding="utf-8")
        found = check([target], given=Given(gpu="h200", gpus=8, step_s=30.0, p99_tokens=900))
        assert render_text(found)


def test_a_check_is_quick(tmp_path: Path) -> None:
    verdict(BROKEN, tmp_path, {})
    start = time.process_time()
    check([tmp_path / name for name, _ in BROKEN], given=Given(gpu="mi250x-gcd", gpus=16))
    assert time.process_time() - start < 0.5


def test_a_credential_is_never_repeated(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwx"
    found = verdict([trl(hub_token=secret), sbatch("--nodes=1", f"export HF_TOKEN={secret}")], tmp_path, {})
    assert "GW659" in codes(found)
    assert all(secret not in text for text in (render_text(found), as_sarif(found), as_github(found), as_json(found)))
