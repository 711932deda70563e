"""Parameters and gradients that are views of flat buffers: no concat runs, and gradients are reduced once a step."""
