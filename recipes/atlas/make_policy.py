"""
Make the tiny policy of the atlas from scratch.

    python recipes/atlas/make_policy.py --out runs/policy

A Qwen3 model of about two million parameters starts with a circuit that can copy (see `induction.py`) and reads
deliberately imperfect demonstrations (see `grounded_rl.data.atlas.demonstrations`), played through the real search
environment so that it sees exactly the tokens it will see later. The commands, time and figures of the policy in the
package are in `recipes/atlas/README.md`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from induction import write_induction_circuit
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from grounded_rl.data.atlas import prepare_atlas
from grounded_rl.data.atlas.demonstrations import Demonstrator, MistakeRates
from grounded_rl.data.atlas.facts import load_facts
from grounded_rl.data.rows import Question, load_questions
from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.corpus import read_corpus
from grounded_rl.rollouts.types import Rollout
from grounded_rl.sampling import RolloutSampler, ScriptedEngine

# The Qwen chat format with a one-line tool list in place of the long schema, so that prompts stay short.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {%- set signature = tool.function if tool.function is defined else tool %}
        {{- ' ' + signature.name + '(' + signature.parameters.properties | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Qwen's pre-tokenisation: contractions, words with a leading blank, single digits, punctuation, white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Loss weights of the tokens of right and wrong answers.
ANSWER_WEIGHTS = {True: 3.0, False: 0.3}
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's control tokens and tags, trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def demonstrations(
    questions: list[Question], tokenizer: PreTrainedTokenizerFast, index: Path, rates: MistakeRates, seed: int
) -> list[Rollout]:
    """One demonstration per question, played through the real environment."""
    environment = SearchEnvironment(tokenizer, prompt_style="plain")
    sampler = RolloutSampler(environment, BM25Retriever.open(index))
    demonstrator = Demonstrator(load_facts(), rates, random.Random(seed))
    scripts = [
        [[*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id] for turn in demonstrator.turns(q)]
        for q in questions
    ]
    engine = ScriptedEngine(scripts, [tokenizer.eos_token_id])
    return sampler.sample(engine, sampler.requests(questions))


def tokenizer_texts(corpus: Path, questions: list[Question], seed: int) -> Iterator[str]:
    """Every passage, then questions and demonstrated turns."""
    for passage in read_corpus(corpus):
        yield f"{passage.title}\n{passage.text}"
    demonstrator = Demonstrator(load_facts(), MistakeRates(), random.Random(seed))
    for question in questions:
        yield question.question
        yield from demonstrator.turns(question)
        yield "Doc 1 (Title: a)\nDoc 2 (Title: a)\nDoc 3 (Title: a)\nTools: search(query)\nsystem\nuser\nassistant\n"


def example(
    rollout: Rollout, tokenizer: PreTrainedTokenizerFast, foreign_weight: float, weight_of_answer: dict[bool, float]
) -> dict[str, list]:
    """
    Every token is learnt: sampled ones at full weight, those of prompt and observations at a smaller one.

    What stands between the answer tags counts more where it is right: wrong answers are noise that can only be
    learnt as noise, while the decision to give one is what the demonstrations are meant to show.
    """
    weights = [foreign_weight] * len(rollout.prompt_ids) + [
        1.0 if sampled else foreign_weight for sampled in rollout.sampled_mask
    ]
    answer = rollout.answer or ""
    tail = len(tokenizer.encode(f" {answer} </answer>", add_special_tokens=False)) + 1
    weights[-tail:] = [weight_of_answer[answer in rollout.answers]] * tail
    return {"input_ids": [*rollout.prompt_ids, *rollout.completion_ids], "weights": weights}


def in_batches_of_like_length(rows: list[dict[str, list]], batch_size: int, seed: int) -> list[dict[str, list]]:
    """The rows in an order whose consecutive batches hold rows of similar length; the order of batches is random."""
    rng = random.Random(seed)
    rows = rng.sample(rows, len(rows))
    pool = 20 * batch_size
    pools = [sorted(rows[i : i + pool], key=lambda row: len(row["input_ids"])) for i in range(0, len(rows), pool)]
    batches = [part[i : i + batch_size] for part in pools for i in range(0, len(part), batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size]
    return [row for batch in rng.sample(full, len(full)) for row in batch]


def collate(pad_id: int, examples: list[dict[str, list]]) -> dict[str, torch.Tensor]:
    """Right-padded batch; `weights` is 0 at padding."""
    longest = max(len(row["input_ids"]) for row in examples)
    ids = [row["input_ids"] + [pad_id] * (longest - len(row["input_ids"])) for row in examples]
    weights = [row["weights"] + [0.0] * (longest - len(row["weights"])) for row in examples]
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in examples]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "weights": torch.tensor(weights),
    }


class WeightedTrainer(Trainer):
    """
    Next-token loss with a weight per token.

    The sum is divided by a constant: dividing by the weights of the batch would favour short rollouts, as
    these fill batches of their own, and teach the policy to answer without searching.
    """

    tokens_per_row = 100.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Weighted sum of the next-token losses, per row of constant length."""
        weights = inputs.pop("weights")[:, 1:]
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), inputs["input_ids"][:, 1:], reduction="none"
        )
        loss = (losses * weights).sum() / (len(weights) * self.tokens_per_row)
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    """Write a policy folder: model in bfloat16 and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the policy to")
    parser.add_argument("--seed", type=int, default=0, help="seed of demonstrations and training")
    parser.add_argument("--start-from", type=Path, help="continue from a policy this script wrote")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-steps", type=int, default=10_000, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-tokens", type=int, default=480, help="longer demonstrations are left out")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--foreign-weight", type=float, default=0.3, help="loss weight of prompt and observations")
    options = parser.parse_args()

    set_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        prepare_atlas(world, counts={"train": options.steps * options.batch_size * 12 // 10})
        questions = load_questions(world / "train.jsonl")
        build_bm25_index(world / "corpus.jsonl", world / "index")
        if options.start_from:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(options.start_from)
        else:
            texts = tokenizer_texts(world / "corpus.jsonl", questions, options.seed)
            tokenizer = make_tokenizer(texts, options.vocab_size)
        rollouts = demonstrations(questions, tokenizer, world / "index", MistakeRates(), options.seed)
        examples = [example(rollout, tokenizer, options.foreign_weight, ANSWER_WEIGHTS) for rollout in rollouts]
        examples = [row for row in examples if len(row["input_ids"]) <= options.max_tokens]
        examples = in_batches_of_like_length(examples, options.batch_size, options.seed)
        train(options, tokenizer, examples)


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised model that can copy."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            rope_theta=1e6,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    write_induction_circuit(model, seed=seed)
    return model


def train(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, examples: list[dict[str, list]]) -> None:
    """Train the model and save it with its tokenizer."""
    if options.start_from:
        model = Qwen3ForCausalLM.from_pretrained(options.start_from, dtype=torch.float32)
    else:
        model = new_model(tokenizer, options.seed)
    lengths = sorted(len(row["input_ids"]) for row in examples)
    median = lengths[len(lengths) // 2]
    print(f"{model.num_parameters():,} parameters, {len(examples):,} demonstrations of {median} tokens (median)")
    trainer = WeightedTrainer(
        model,
        TrainingArguments(
            output_dir=str(options.out / "checkpoints"),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=30,
            weight_decay=0.01,
            adam_beta2=0.98,
            logging_steps=20,
            save_strategy="steps",
            save_steps=options.save_steps,
            report_to="none",
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            seed=options.seed,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=examples,
        data_collator=lambda rows: collate(tokenizer.pad_token_id, rows),
    )
    trainer.train()
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
