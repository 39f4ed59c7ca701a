"""A small BERT, made from a config, learns to tell Python code from prose: the Trainer of Transformers over lightcc.

    lightccrun -np 2 python examples/transformers_code_or_prose.py --png curve.png

pip install transformers accelerate. Only the call of init is lightcc's; the rest is an ordinary program for Trainer.
"""
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

import code_or_prose
import lightcc.torch.accelerate


def rows(ids, classes):
    return [{"input_ids": line, "attention_mask": (line > 0).long(), "labels": of} for line, of in zip(ids, classes)]


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


def main():
    args = code_or_prose.arguments(__doc__)
    torch.set_num_threads(1)  # the ranks share the cores
    lightcc.torch.accelerate.init()
    train, test = code_or_prose.load(args.lines)
    torch.manual_seed(1)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=code_or_prose.ALPHABET, max_position_embeddings=code_or_prose.LENGTH, hidden_size=64,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=128))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=code_or_prose.BATCH, per_device_eval_batch_size=256,
            num_train_epochs=args.epochs, learning_rate=5e-4, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, log_level="error", average_tokens_across_devices=False)
        trainer = Trainer(model, arguments, train_dataset=rows(*train), eval_dataset=rows(*test),
                          compute_metrics=accuracy)
        trainer.remove_callback(PrinterCallback)  # it prints every step
        trainer.train()
        found = trainer.evaluate()["eval_accuracy"]
    if arguments.process_index == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        code_or_prose.report("Trainer", losses, found, arguments.world_size, args.png)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
