"""A graph network, trained on a graph of communities that a seed makes, then converted.

    pip install torch-geometric
    python examples/graph_network.py [--small] [--device cuda]

You learn what becomes of code from a library that kfconvert knows nothing of: the messages along the edges stay what
they are, the layers around them are fused. Part of the nodes is named in training, and the others are asked for.
"""

import torch
from shared import converted, options_of
from torch import nn
from torch.nn import functional as F

import kfconvert

COMMUNITIES, FEATURES = 4, 16
NAMED = 0.1  # of the nodes


def graph(nodes):
    """(features, edges, communities) of a graph in which neighbours are mostly of one community.

    features: (nodes, FEATURES), of which alone little can be told; edges: (2, number of edges), both ways;
    communities: (nodes,).
    """
    generator = torch.Generator().manual_seed(0)
    communities = torch.arange(nodes) % COMMUNITIES
    centers = torch.randn(COMMUNITIES, FEATURES, generator=generator)
    features = centers[communities] + 2 * torch.randn(nodes, FEATURES, generator=generator)
    alike = communities[:, None] == communities
    shares = torch.where(alike, 6.0 * COMMUNITIES, 1.5) / nodes
    edges = torch.triu(torch.rand(nodes, nodes, generator=generator) < shares, 1).nonzero().T
    return features, torch.cat((edges, edges.flip(0)), 1), communities


def network(width, layers):
    """The model, whose class can be made only where torch-geometric is."""
    try:
        from torch_geometric.nn import GCNConv
    except ImportError:
        raise SystemExit("the layers are those of torch-geometric: pip install torch-geometric") from None

    class GraphNetwork(nn.Module):
        """Scores of the communities of each node. (nodes, FEATURES), (2, edges) -> (nodes, COMMUNITIES)"""

        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width))
            self.convs = nn.ModuleList(GCNConv(width, width) for _ in range(layers))
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
            self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, COMMUNITIES))

        def forward(self, features, edges):
            x = self.encoder(features)
            for conv, norm in zip(self.convs, self.norms):
                x = x + torch.relu(norm(conv(x, edges)))
            return self.head(x)

    return GraphNetwork()


def train(model, features, edges, communities, named, steps):
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(features, edges)[named], communities[named]).backward()
        optimizer.step()
    return model.eval()


def main(argv=None):
    options = options_of(__doc__).parse_args(argv)
    nodes, width, steps = (400, 32, 60) if options.small else (4000, 128, 200)
    torch.manual_seed(0)
    model = network(width, 2).to(options.device)
    features, edges, communities = (tensor.to(options.device) for tensor in graph(nodes))
    named = torch.rand(nodes, generator=torch.Generator().manual_seed(1)).to(options.device) < NAMED
    train(model, features, edges, communities, named, steps)

    fused = converted("GraphNetwork", model, (features, edges), options.small)
    with torch.no_grad():
        found = [which(features, edges).argmax(-1) for which in (model, fused)]
    right = [(each == communities)[~named].double().mean().item() for each in found]
    print(f"right of {int((~named).sum())} nodes that were not named: {right[0]:.1%}, converted {right[1]:.1%}")
    accurate, speedup = kfconvert.validate_optimization(model, fused, (features, edges))
    print(f"accurate {accurate}, {speedup:.2f} x as fast as the original")
    return 0 if accurate and right[0] > 2 / COMMUNITIES else 1


if __name__ == "__main__":
    raise SystemExit(main())
