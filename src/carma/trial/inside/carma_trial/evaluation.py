"""After the steps, leads the script to its evaluation, whose batches may be larger than those of training.

The loaders of the training give no more batches, so the script leaves its loop and goes on. Whatever happens then, the
report of the steps is written.
"""

import sys
import threading
import weakref

import torch

from . import replaces, report

BATCHES = 2  # of each further loader
_PATIENCE_S = (4.0, 10.0)  # limits of the time for the evaluation, which is that of the steps
_ROUNDS = 200  # epochs without a batch, after which nothing else is expected
_LATER = 6  # maximum number of loaders created after the steps, perhaps one in each epoch
_MORE_STEPS = 3  # maximum number of further steps of a training that ignores its loader

_made = weakref.WeakSet()
_used = weakref.WeakSet()
_seen = set()  # (dataset, batch size) of loaders that returned batches: some libraries create a loader again
_now = {"reached": False, "rounds": 0, "steps": 0, "given": 0, "used": False, "seen": False, "later": 0}


def reached():
    return _now["reached"]


def seen():
    """Notes a pass without gradients after a step."""
    _now["seen"] = True


def install():
    loader, iterators = torch.utils.data.DataLoader, torch.utils.data.dataloader._BaseDataLoaderIter
    replaces(loader, "__init__")(_make_loader)
    replaces(loader, "__iter__")(_begin)
    replaces(iterators, "__init__")(_make_iterator)
    replaces(iterators, "__next__")(_next)


def _make_loader(make, self, *args, **words):
    make(self, *args, **words)
    _made.add(self)
    self._carma_later = _now["reached"]


def _begin(begin, self):
    if not _now["reached"]:
        _used.add(self)
        _seen.add(_key(self))
        _now["used"] = True
    elif self in _used:
        _now["rounds"] += 1
        if _now["rounds"] > _ROUNDS:
            finish()
    return begin(self)


def _make_iterator(make, self, loader, *args, **words):
    make(self, loader, *args, **words)
    self._carma_loader = loader  # it may have been made for this loop only
    self._carma_given = 0


def _next(following, self):
    if _now["reached"]:
        _allow(self)
    return following(self)


def _key(loader):
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return id(loader.dataset), size


def _allow(iterator):
    loader = iterator._carma_loader
    if loader in _used:
        raise StopIteration
    if iterator._carma_given >= BATCHES:
        _used.add(loader)
        _seen.add(_key(loader))
        _now["later"] += loader._carma_later
        if _now["later"] >= _LATER or not (loader._carma_later or _unused()):
            finish()
        raise StopIteration
    iterator._carma_given += 1
    _now["given"] += 1


def _unused():
    return [loader for loader in list(_made) if loader not in _used and _key(loader) not in _seen]


def _ask_trainers():
    """Each object whose methods are running may be one."""
    frame = sys._getframe(1)
    while frame is not None:
        holder = frame.f_locals.get("self")
        if _has(holder, "fit_loop") and _has(holder, "val_check_batch"):
            holder.val_check_batch = 1  # Lightning counts batches: it does not evaluate after an epoch cut short
        frame = frame.f_back


def _has(holder, name):
    try:
        return getattr(holder, name, None) is not None
    except Exception:  # an object of the script's, which may answer in any way
        return False


def after_steps():
    """Called at the last step that is wanted, and at each one after it."""
    if _now["reached"]:
        _now["steps"] += 1
        if _now["steps"] >= _MORE_STEPS:
            finish()
        return
    _now["reached"] = True
    if not _now["used"]:
        finish()
    _ask_trainers()
    least_s, most_s = _PATIENCE_S
    timer = threading.Timer(min(most_s, max(least_s, report.running_s())), finish)
    timer.daemon = True
    timer.start()


def finish():
    if _now["seen"] or (_now["given"] and not _now["steps"]):
        report.flags.add("evaluation")
    else:
        report.warn("the trial run saw no evaluation: one with larger batches would need more memory")
    report.write("steps")
    report.leave()
