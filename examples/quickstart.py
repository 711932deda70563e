"""A small training whose layers are replayed from graphs: capture them in one call, and train as ever.

python examples/quickstart.py    # CUDA graphs on a GPU, the recorder elsewhere
"""

import torch

import te_graph as tg


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    sample = torch.randn(8, 32, 64, requires_grad=True)
    tg.make_graphed_callables(tuple(layers), tuple((sample,) for _ in layers))  # on CUDA tensors: CUDA graphs

    for step in range(3):
        for _ in range(4):  # micro-batches
            x = torch.randn(8, 32, 64, requires_grad=True)
            model(x).square().mean().backward()  # replays; adds into p.grad inside the graph
        norm = tg.clip_grad_norm_(model.parameters(), 1.0)  # two launches, and the host does not wait
        optimizer.step()
        optimizer.zero_grad()  # set_to_none is fine
        print(f"step {step + 1}: gradient norm {norm.item():.4f}")

    for number, layer in enumerate(layers):
        info = layer.te_graph.info()
        print(f"layer {number}: {info['forward_replays']} forwards and {info['backward_replays']} backwards replayed")


if __name__ == "__main__":
    main()
