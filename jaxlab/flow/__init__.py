"""Flow matching: inversion and region-aware editing of samples with a trained model, without training."""

from jaxlab.flow import fields, time_grids
from jaxlab.flow.diffusion import DiffusionFlow, ddim_as_flow
from jaxlab.flow.flow_edit import flow_edit
from jaxlab.flow.metrics import psnr, ssim, structure_distance
from jaxlab.flow.noising import delayed_injection, sdedit
from jaxlab.flow.orientation import check_orientation, orientation
from jaxlab.flow.rf_inversion import rf_inversion_edit, rf_inversion_invert
from jaxlab.flow.solvers import (
    calls,
    euler_slope,
    heun_slope,
    invert,
    midpoint_slope,
    sample,
    time_shifted_slope,
)
from jaxlab.flow.stages import staged
from jaxlab.flow.uni_edit import Edit, delayed_steps, edit_latents, uni_edit, velocity_mask
from jaxlab.flow.uni_inv import Inversion, uni_invert
from jaxlab.flow.velocity import (
    Velocity,
    batch_time,
    checked,
    flip_time,
    from_linen,
    from_nnx,
    guided,
    in_dtype,
    paired,
)

__all__ = [
    "DiffusionFlow",
    "Edit",
    "Inversion",
    "Velocity",
    "batch_time",
    "calls",
    "check_orientation",
    "checked",
    "ddim_as_flow",
    "delayed_injection",
    "delayed_steps",
    "edit_latents",
    "euler_slope",
    "fields",
    "flip_time",
    "flow_edit",
    "from_linen",
    "from_nnx",
    "guided",
    "heun_slope",
    "in_dtype",
    "invert",
    "midpoint_slope",
    "orientation",
    "paired",
    "psnr",
    "rf_inversion_edit",
    "rf_inversion_invert",
    "sample",
    "sdedit",
    "ssim",
    "staged",
    "structure_distance",
    "time_grids",
    "time_shifted_slope",
    "uni_edit",
    "uni_invert",
    "velocity_mask",
]
