"""Datasets: question rows and the embedded atlas world."""

from grounded_rl.data.rows import Question, load_questions, save_questions

__all__ = ["Question", "load_questions", "save_questions"]
