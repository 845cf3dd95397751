"""The prompts of the modes with one turn, and the sources of their words. Mode ``agent`` uses the task's own prompt.

=========  =======================================================================================================
direct     question answering: the instruction of FlashRAG's zero-shot example (``examples/methods/run_exp.py``), word
           for word. There it is the system prompt and the question the user's, with a blank line between them for a
           base model; here it is one text, and ``Answer:`` stands behind it. Multiple choice: the same, asking for
           the letter.
cot        question answering: Search-R1's ``scripts/data_process/nq.py``, word for word. Multiple choice: the prefix
           prompt of the paper's appendix without what it says about searching, and without the word "medical".
rag        question answering: Search-R1's ``scripts/data_process/nq_rag.py``, word for word. Multiple choice: the
           words of ``cot``, with the context put as nq_rag.py puts it.
=========  =======================================================================================================

FlashRAG's words were read in its repository, Search-R1's in public copies of its repository.

A policy with a closed vocabulary (``Task.vocabulary``) cannot read these prompts and gets its task's own. In mode
``rag`` a search for the question and its result follow the prompt, as if the policy had searched in its first turn.
"""

from __future__ import annotations

from sorl_env.errors import UserError, did_you_mean
from sorl_env.task import Example, Task

MODES = ("direct", "cot", "rag", "agent")

_TAGGED = (
    "You should first have a reasoning process in mind and then provides the answer. Show your reasoning in <think> "
    "</think> tags and return the final answer in <answer> </answer> tags, for example <answer> Beijing </answer>. "
    "Question: {question}"
)
_ANALYZE = (
    "You should analyze the question carefully, evaluate the given context (which may or may not be useful), and then "
    "generate an accurate and well-reasoned response. "
)
_LETTER = (
    "Think step-by-step inside <think> and </think> tags. After sufficient reasoning, provide your final answer "
    "inside <answer> and </answer> with ONLY the letter (e.g., <answer>A</answer>).\n\nQuestion: {question}\n"
    "Options:\n{options}"
)
_QUESTION = {
    "direct": (
        "Answer the question based on your own knowledge. Only give me the answer and do not output any other words.\n"
        "Question: {question}\nAnswer:"
    ),
    "cot": f"Answer the given question. {_TAGGED}\n",
    "rag": (
        f"Answer the given question with some potentially useful context. {_ANALYZE}{_TAGGED} "
        "Context: {context} \n"
    ),
}
_CHOICE = {
    "direct": (
        "Answer the given multiple-choice question based on your own knowledge. Only give me the letter of the answer "
        "and do not output any other words.\nQuestion: {question}\nOptions:\n{options}\nAnswer:"
    ),
    "cot": f"Answer the given multiple-choice question. {_LETTER}\n",
    "rag": (
        "Answer the given multiple-choice question with some potentially useful context. "
        f"{_ANALYZE}{_LETTER}\nContext: {{context}}\n"
    ),
}
# A turn ends with its answer, or where a base model begins to make up the next question.
STOP: tuple[str, ...] = ("</answer>", "\nQuestion:")


def check_modes(modes: list[str]) -> None:
    """Raise ``UserError`` for an unknown mode."""
    for mode in modes:
        if mode not in MODES:
            raise UserError(f"there is no mode {mode!r}. {did_you_mean(mode, MODES)}")


def one_turn_prompt(mode: str, task: Task, example: Example, context: str = "") -> str:
    """The whole prompt of mode ``direct``, ``cot`` or ``rag``; ``context`` is what the search of ``rag`` found."""
    if task.vocabulary is not None:
        return task.prompt(example) + (_searched(example.question, context) if mode == "rag" else "")
    question = example.question.strip()
    if not example.options:
        if not question.endswith("?"):  # as Search-R1's data preparation does
            question += "?"
        return _QUESTION[mode].format(question=question, context=context)
    options = "\n".join(f"{letter}: {text}" for letter, text in example.options.items())
    return _CHOICE[mode].format(question=question, options=options, context=context)


def _searched(question: str, context: str) -> str:
    return f"<think></think> <search> {question} </search>\n\n<information>\n{context}\n</information>\n\n"
