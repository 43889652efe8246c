"""Tokenise documents once into shards for training."""

import argparse
import functools
from collections.abc import Mapping
from pathlib import Path

from xlstm_jax.cli.shared.screen import as_command, as_value, describe_error, print_error, print_out
from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.shards.manifest import Manifest
from xlstm_jax.dataset.tokenizers.light import BYTE_TOKENIZER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = functools.partial(parser.add_argument, default=argparse.SUPPRESS)  # `prepare` sets the defaults
    add(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files, folders or glob patterns of text, JSON lines or Parquet; or one of: stdlib, hf:NAME, a folder "
        "written by save_to_disk, a folder of ArrayRecord files of text",
    )
    add("--output", required=True, metavar="FOLDER", help="the folder to write to; each split gets its own subfolder")
    add("--split", help="the split to read and write; by default, train")
    add("--validation-share", type=float, metavar="X", help="write this share of documents to the validation split")
    add(
        "--tokenizer",
        dest="tokenizer_path",
        metavar="PATH",
        help="a folder, a tokenizer.json, a name on the hub, or byte (the default)",
    )
    add(
        "--train-tokenizer",
        dest="train_vocab_size",
        type=int,
        metavar="VOCAB_SIZE",
        help="train a byte-level BPE tokenizer, save it in FOLDER/tokenizer and use it",
    )
    add("--train-megabytes", type=float, metavar="N", help="how much text to train the tokenizer on")
    add("--add-bos", action="store_true", help="start each document with the BOS token")
    add("--add-eos", action="store_true", help="end each document with the EOS token; training adds one by itself")
    add("--column", metavar="NAME", help="the field or column that holds the text; by default, text")
    add(
        "--on-bad-data",
        choices=("error", "skip"),
        help="stop at unusable documents (the default), or skip and count them",
    )
    add(
        "--max-document-bytes",
        type=int,
        metavar="N",
        help="split longer plain-text files at line ends; 0 to never split",
    )
    add("--shard-megabytes", type=float, metavar="N", help="text per shard; by default, about 1/256 of all text")
    add(
        "--workers",
        dest="num_workers",
        type=int,
        metavar="N",
        help="the number of tokenising processes; by default, one per core",
    )
    add("--overwrite", action="store_true", help="replace shards that were prepared with other options")
    add("--verify", action="store_true", help="read all existing shards and rewrite damaged ones")


def run(args: argparse.Namespace) -> int:
    """Prepare the sources and return the exit code."""
    options = {name: value for name, value in vars(args).items() if name not in ("run", "is_process")}
    share = options.get("validation_share")
    if share is not None and not 0 < share < 1:
        print_error(f"--validation-share is {share}, but must be more than 0 and less than 1.")
        return 2
    if options.get("max_document_bytes") == 0:
        options["max_document_bytes"] = None
    try:
        manifests = prepare(**options)
    except ConfigError as error:
        print_error(str(error))
        return 2
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print_error(describe_error(error))
        return 1
    except KeyboardInterrupt:
        print_error("Stopped. The same command resumes from here.")
        return 130
    print_out(_describe_result(Path(args.output), manifests))
    return 0


def _describe_result(output: Path, manifests: Mapping[str, Manifest]) -> str:
    """Return a line for each split, and the command that trains on the shards."""
    parts = []
    for name, manifest in manifests.items():
        skipped = ", ".join(f"{count} × {reason}" for reason, count in manifest.skipped.items())
        parts.append(
            f"{output / name}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
            f"{len(manifest.shards)} shard{'s' * (len(manifest.shards) > 1)}"
            + (f", skipped: {skipped}" if skipped else "")
        )
    return "\n".join([*parts, f"Train on it:  {_train_command(output, manifests)}"])


def _train_command(output: Path, manifests: Mapping[str, Manifest]) -> str:
    """Return the command that trains on the split `train` or, if there is none, on the first split."""
    tokenizer_path = next(iter(manifests.values())).tokenizer_path
    words = ["data=prepared", f"data.data_path={as_value(output)}"]
    if tokenizer_path != BYTE_TOKENIZER:
        words.append(f"data.tokenizer_path={as_value(Path(tokenizer_path))}")
    if "train" not in manifests:
        words.append(f"data.train.split={next(iter(manifests))}")
    if "validation" not in manifests:
        words.append("data.validation=null")
    return as_command("train", *words)
