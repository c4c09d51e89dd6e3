"""Rewards that stand on a library: math-verify and reasoning-gym."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from streamrl.run.prompts.prompt_spec import read_spec
from streamrl.run.prompts.prompt_tasks import TaskRows

pytest.importorskip("math_verify")
pytest.importorskip("reasoning_gym")


GSM8K = "He pays $5 for each of 3 and $7 for the rest, $5*3+$7*3 = $<<5*3+7*3=36>>36.\n#### 36"


@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        ("42", r"Thus \boxed{42}.", 1),
        (42, "The answer is 42", 1),
        ("1/2", r"so $\frac{1}{2}$", 1),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        (r"$\frac{1}{2}$", "0.25", 0),
        (r"\sqrt{8}", r"it is $2\sqrt{2}$", 1),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^2}", 1),
        ("x^2 + 2x + 1", r"\boxed{(x+1)^3}", 0),
        (r"(1, 2)", r"\boxed{(1,2)}", 1),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1),
        ("8", r"\boxed{8}, since $x = 7$ is too small.", 1),  # a box goes before anything else
        ("10", "nothing to see", 0),
        ("10", "", 0),
        (["3", "4"], r"\boxed{4}", 1),
        # between thousands
        (r"10\,000", r"\boxed{0}", 0),
        (r"10\,000", r"\boxed{10000}", 1),
        (r"25\,000", r"\boxed{25,000}", 1),
        ("10000", r"\boxed{10\,000}", 1),
        ("10000", r"\boxed{10\ 000}", 1),
        ("10000", r"\boxed{10 000}", 1),
        ("1000000", r"it is $1\,000\,000$", 1),
        ("1000", r"\boxed{1{,}000}", 1),
        ("1000", r"\boxed{1,\!000}", 1),
        ("3", "There are 2 300 page books, so 3", 1),
        ("2\\cdot 100", r"\boxed{2 \cdot 100}", 1),
        ("42", r"\boxed{42.}", 1),
        (r"\$32,348", r"\boxed{\$32,348}", 1),
        (r"\$5", r"it costs \boxed{5}", 1),
        # of several boxes the last one
        ("3", r"I get \boxed{2}. Hmm, wrong. It is \boxed{3}", 1),
        ("2", r"I get \boxed{2}. Hmm, wrong. It is \boxed{3}", 0),
        ("3", "\\boxed{2}\n\nWait, that is wrong.\n\nSo the final answer is \\boxed{3}.", 1),
        ("3", r"Put the answer in \boxed{}. It is \boxed{3}", 1),
        (r"\frac{1}{\sqrt{3}}", r"$\boxed{\frac{1}{2}}$, no: $\boxed{\frac{1}{\sqrt{3}}}$", 1),
        (r"\{1, 2\}", r"The roots are \boxed{1} and \boxed{2}.", 1),
        ("1", r"The roots are \boxed{1} and \boxed{2}.", 0),
        # numbers that JSON writes with an exponent
        (0.00001, r"\boxed{0.00001}", 1),
        (0.00001, r"\boxed{-5+e}", 0),
        (1e16, r"\boxed{10^{16}}", 1),
        (2.5, r"\boxed{5/2}", 1),
        # whole solutions as gold: of GSM8K, whose dollars are no LaTeX, and of MATH; and completions in GSM8K's form
        (GSM8K, "so 36", 1),
        (GSM8K, "so 15", 0),
        (GSM8K, "it is 21.\n#### 36\nand not 9", 1),
        (GSM8K.replace("36", "1,036"), r"\boxed{1036}", 1),
        ("x is \\boxed{5}\n#### 7", r"\boxed{7}", 1),
        (r"Hence $x=2$, so $\boxed{\frac{1}{2}}$ is the sum.", "it is $0.5$", 1),
        (r"Hence $x=2$, so $\boxed{\frac{1}{2}}$ is the sum.", "it is 2", 0),
        ("5", "#### Step 3: add\nthat is 5", 1),
        ("1500", "#### $1,500\nwith 3 left", 1),
        ("3", "\\boxed{3}\n#### 4", 1),
    ],
)
def test_math(make, score, answer, completion, value) -> None:
    assert score(make("math"), completion, answer=answer) == value


def test_only_what_is_boxed(make, score) -> None:
    boxed = make("math", boxed=True)
    assert score(boxed, "The answer is 42", answer="42") == 0
    assert score(boxed, r"The answer is $42$", answer="42") == 0
    assert score(boxed, r"\boxed{42}", answer="42") == 1


@pytest.mark.parametrize("answer", [None, True, float("nan"), float("inf"), []])
def test_a_bad_dataset_answer_is_a_failure_and_no_zero(make, score, answer) -> None:
    """A value that is no answer of the dataset is a failure, and no zero."""
    with pytest.raises(ValueError, match=r"is no answer: correct it|is an empty list"):
        score(make("math"), r"\boxed{None}", answer=answer)


def test_an_answer_without_mathematics_is_a_failure(make, score) -> None:
    """An answer of the dataset that is no mathematics is a failure, and no zero."""
    with pytest.raises(ValueError, match="the answer '' of this prompt cannot be read as mathematics: correct it"):
        score(make("math"), r"\boxed{1}", answer="")


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "countdown", "sudoku", "rearc", "knights_knaves"])
def test_the_verifier_reads_answers_back_from_columns(make, score, task) -> None:
    """The verifier knows the answers of its task after they were written to columns and read. ``rearc`` compares
    tuples, ``knights_knaves`` brings NumPy's text, ``sudoku`` nested lists."""
    rows = TaskRows(read_spec(f"reasoning_gym:{task}?size=2&seed=3"))
    row = msgspec.msgpack.decode(msgspec.msgpack.encode(rows.row(1)))
    reward = make("reasoning_gym")
    assert reward.signature.columns == ("answer", "metadata", "task")
    assert "<answer>" in row["prompt"]
    right = score(reward, f"thinking <answer>0</answer> <answer> {row['answer']} </answer>", **row)
    assert right == 1
    assert score(reward, "<answer>what?</answer>", **row) < 1
    assert score(reward, str(row["answer"]), **row) == 0  # not between the tags
    assert score(make("reasoning_gym", extract=""), str(row["answer"]), **row) == 1


def test_a_task_that_the_dataset_misspells_is_a_failure(make, score) -> None:
    with pytest.raises(ValueError, match='the task "sums" of this prompt is none of reasoning-gym'):
        score(make("reasoning_gym"), "<answer>1</answer>", answer="1", metadata={}, task="sums", prompt="")
    reward = make("reasoning_gym", task="chain_sum")
    assert score(reward, "<answer>1</answer>", answer="1", metadata={}, prompt="") == 1


HEAVY = ("math_verify", "sympy", "reasoning_gym", "pyarrow", "httpx", "torch", "transformers", "matplotlib")


def test_the_registry_imports_no_library() -> None:
    """The start of every process that looks a reward up stays what it was."""
    program = (
        "import sys, json\nimport streamrl.rewards.builtin.catalog, streamrl.run.prompts.open_prompts\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
