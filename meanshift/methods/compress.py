"""CompRess (Abbasi Koohpayegani, Tejankar, Pirsiavash 2020): compress a teacher into a student.

Read `CompRess.forward`. Teacher and student see the same weak view. Each compares it with a queue
of its own past embeddings; the student learns the teacher's distribution over the queue.

Paper: https://arxiv.org/abs/2010.14713 ("Ours-2q"). Official files: UMBCvision/CompRess
`train_student.py`, `nn/compress_loss.py`, which are followed: both queues are compared before the
batch is added, and the student's queue is filled by a moving average of the student whose batch
norm uses the batch. The student ends in a linear layer to the teacher's size and is evaluated
before it; the code has this layer for a ResNet-50 student only, the others have none.
Differences: the queues start with random rows of unit length (the code: uniform values), and the
learning rate follows a cosine (the code: times 0.2 at epochs 90 and 120 of 130).
Not verified: in which of the paper's experiments the student has the linear layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from meanshift.config import Views, ViewSpec
from meanshift.methods.base import Batch, BuildContext, StepOutput
from meanshift.methods.embeddings import check_embedding, normalize
from meanshift.methods.memory_bank import MemoryBank
from meanshift.methods.momentum_target import MomentumTarget
from meanshift.methods.teacher import Teacher


class CompRess(MomentumTarget):
    """Give a student the similarities between images that a frozen teacher finds.

    `encoder` is the student, any module that maps an input to `dim` values.

    >>> method = CompRess(encoder, dim=2048, teacher=Teacher(network, dim=2048))
    >>> output = method(view, ids=ids)
    >>> output.loss.backward(); optimizer.step(); method.after_update()
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int,
        *,
        teacher: Teacher,
        bank_size: int = 128_000,
        temperature: float = 0.04,
        momentum: float = 0.999,
        cached_samples: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.temperature = temperature
        self.momentum = momentum
        self.cached_samples = cached_samples
        self.online = encoder
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.teacher = teacher
        self.student_queue = MemoryBank(bank_size, dim, seed=seed)
        self.teacher_queue = MemoryBank(bank_size, teacher.dim, seed=seed + 1)

    def forward(
        self,
        view: Any,
        *,
        ids: Int[Tensor, " batch"] | None = None,
        labels: Int[Tensor, " batch"] | None = None,
    ) -> StepOutput:
        """One step of the paper, up to the loss; in eval mode the queues are only compared."""
        student = normalize(check_embedding(self.online(view), self.dim))
        key = self.project(view)
        teacher = self.teacher(view, ids)
        loss = self._divergence(teacher, student)
        if self.training:
            self.student_queue.enqueue(key, ids=ids, labels=labels)
            self.teacher_queue.enqueue(teacher, ids=ids, labels=labels)
        return StepOutput(loss, key)

    def _divergence(
        self, teacher: Float[Tensor, "batch teacher_dim"], student: Float[Tensor, "batch dim"]
    ) -> Float[Tensor, ""]:
        """KL(teacher || student) of the distributions over the queues, the mean of the batch."""
        with torch.autocast(student.device.type, enabled=False):
            # A copy: the backward pass needs the rows that the batch overwrites.
            student_rows = self.student_queue.rows.to(student.dtype, copy=True)
            teacher_rows = self.teacher_queue.rows.to(teacher.dtype)
            predicted = (student @ student_rows.T / self.temperature).log_softmax(1)
            wanted = (teacher @ teacher_rows.T / self.temperature).log_softmax(1)
            return F.kl_div(predicted, wanted, reduction="batchmean", log_target=True)

    def step(self, batch: Batch) -> StepOutput:
        self.shuffle_seed = batch.shuffle_seed
        output: StepOutput = self(batch.views[0], ids=batch.ids, labels=batch.labels)
        return output

    def begin_session(self, batches: Callable[[], Iterator[Batch]]) -> None:
        """With a cached teacher: its features of all samples, in evaluation views."""
        if self.cached_samples:
            rows = self.teacher_queue.rows.new_zeros(self.cached_samples, self.teacher.dim)
            self.teacher.fill_cache(batches(), rows)

    @classmethod
    def views(cls, settings: Any, operators: Views) -> tuple[ViewSpec, ...]:  # noqa: ARG003
        return (operators.spec("student and teacher", "weak", index=1),)

    @classmethod
    def build(cls, settings: Any, context: BuildContext) -> CompRess:
        cached_samples = settings.cached_samples(context.dataset_size)
        teacher = Teacher.load(settings.teacher)
        dim = settings.dim or teacher.dim
        return cls(
            context.encoder(projector=lambda features: nn.Linear(features, dim)),
            dim,
            teacher=teacher,
            bank_size=settings.bank_size,
            temperature=settings.temperature,
            momentum=settings.momentum,
            cached_samples=cached_samples,
            seed=context.seed,
        )

    def memory_use(self, batch_size: int) -> dict[str, int]:
        queues = (self.student_queue, self.teacher_queue)
        use = {
            "two queues, also in each checkpoint": sum(
                b.nbytes for q in queues for b in q.buffers()
            )
        }
        if self.cached_samples:
            name = f"the teacher's features of {self.cached_samples:,} samples"
            use[name] = self.cached_samples * self.teacher.dim * self.teacher_queue.rows.itemsize
        return use

    def not_saved(self) -> tuple[str, ...]:
        return ("teacher.network.",)

    def card(self) -> dict[str, Any]:
        return self.teacher.card()

    def collapse_hint(self) -> str:
        return (
            "the teacher gives all images the same features (another method.teacher), or the "
            "learning rate is too high (halve optim.lr)"
        )
