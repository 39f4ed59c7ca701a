"""A sampler whose progress in an epoch outlives a change of the world."""
from typing import Any, Dict, Iterator, List

import torch

from lightcc.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler):
    """Splits over the ranks those samples of an epoch that are not done yet.

    All ranks have the same order: shuffled by seed and epoch, or that of the dataset. In a world of n ranks, rank r has
    every n-th sample from the r-th on of what remains, so batches that all ranks have done are a head of that order,
    and a number tells which: processed_num. Ranks have equally many samples: where the rest does not divide by n, up
    to n - 1 of its first samples come twice, at the very end of an epoch. What is counted by record_batch and committed
    with the state is seen once and not lost when the world changes; after a failure the batches since the last commit
    are trained again, from the parameters of that commit.

    dataset: anything with a length. shuffle: whether each epoch has an order of its own. seed: equal on all ranks.
    Attributes: epoch, processed_num, num_replicas, rank, remaining_indices (of all ranks), num_samples (of this one),
    total_size (num_samples of all ranks, with what comes twice).

    Give it to a DataLoader, call record_batch after each step and set_epoch at the *end* of each epoch, as that forgets
    the progress. With drop_last=True samples at the end of an epoch are left out. The sampler must be a part of the
    state (TorchState(..., sampler=sampler)), which splits anew in each new world.
    Errors: ValueError before init. Source: horovod.torch.elastic.sampler.

    >>> sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    >>> sampler.record_batch(0, batch_size=8 // hvd.size()); sampler.reset(); list(sampler)
    []
    >>> sampler.set_epoch(1); len(sampler) == 8 // hvd.size()
    True
    """

    def __init__(self, dataset, shuffle: bool = True, seed: int = 0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch from its first sample."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch of all ranks as done: batch_size samples on each. batch_idx: not looked at."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Goes to where another sampler was, and splits what remains there."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> Dict[str, Any]:
        """Where it is: epoch and processed_num."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Splits what remains of the epoch over the ranks of the present world."""
        self.num_replicas, self.rank = size(), rank()
        self.remaining_indices = self._order()[self.processed_num:]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = self.remaining_indices
        mine = indices[self.rank::self.num_replicas]
        if len(mine) < self.num_samples:  # at most one: total_size is less than num_replicas above what there is
            mine.append(indices[(self.total_size - self.num_replicas + self.rank) % len(indices)])
        return iter(mine)

    def __len__(self) -> int:
        return self.num_samples

    def _order(self) -> List[int]:
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
