"""PyTorch Lightning on two cards: it makes new loaders, and starts the second process itself."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(256, 10)

    def training_step(self, batch, _index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _index):
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    data = TensorDataset(torch.randn(1024, 256), torch.randint(0, 10, (1024,)))
    trainer = lightning.Trainer(
        accelerator="gpu", devices=2, strategy="ddp", max_epochs=2, num_sanity_val_steps=0, default_root_dir="out"
    )
    trainer.fit(Net(), DataLoader(data, batch_size=64), DataLoader(data, batch_size=256))
