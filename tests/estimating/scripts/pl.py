"""PyTorch Lightning; the argument is the precision."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10))

    def training_step(self, batch, _index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _index):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


data = TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,)))
trainer = lightning.Trainer(
    accelerator="gpu", devices=1, max_epochs=2, precision=sys.argv[1], gradient_clip_val=1.0, default_root_dir="out"
)
trainer.fit(Net(), DataLoader(data, batch_size=64, num_workers=2, shuffle=True), DataLoader(data, batch_size=256))
