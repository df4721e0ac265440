"""The pictures of the experiment."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxlab.experiments.base import Run

__all__ = ["edits", "local_error", "reconstruction", "strips"]

_NAMES = {"uni_inv": "Uni-Inv", "uni_inv_3": "Uni-Inv, 3 corrections", "rf_solver": "RF-Solver", "fireflow": "FireFlow"}


def local_error(run: Run, found: Mapping[str, np.ndarray]) -> None:
    """Error of one step up and down against its size."""
    with run.figure("local_error", figsize=(4.5, 3.4)) as (_, axes):
        for name, order in (("euler", 2), ("uni_inv", 3)):
            line = axes.loglog(found["step"], found[name], "o", label=_NAMES.get(name, name))[0]
            slope = found[name][0] * (found["step"] / found["step"][0]) ** order
            axes.loglog(found["step"], slope, "--", color=line.get_color(), linewidth=1, label=f"order {order}")
        axes.set_xticks(found["step"], [f"{step:g}" for step in found["step"]])
        axes.minorticks_off()
        axes.set_xlabel("step h")
        axes.set_ylabel("error of one step there and back")
        axes.legend(fontsize=7)


def reconstruction(run: Run, bandwidths: Sequence[float], calls: Sequence[int], psnr: Mapping[str, np.ndarray]) -> None:
    """PSNR ``[calls, bandwidths]`` of every method against calls, one panel a bandwidth."""
    size = (3 * len(bandwidths) + 1, 3.2)
    with run.figure("reconstruction", ncols=len(bandwidths), squeeze=False, figsize=size) as (_, axes):
        for j, (panel, bandwidth) in enumerate(zip(axes[0], bandwidths, strict=True)):
            for method, values in psnr.items():
                style = {"linewidth": 2.5, "color": "black"} if method == "uni_inv" else {"linewidth": 1.2}
                panel.plot(calls, values[:, j], "o-", markersize=3, label=_NAMES.get(method, method), **style)
            panel.set_title(f"bandwidth {bandwidth:g}", fontsize=9)
            panel.set_xlabel("calls each way")
        axes[0, 0].set_ylabel("PSNR of the reconstruction (dB)")
        axes[0, -1].legend(fontsize=6)


def edits(run: Run, families: Mapping[str, Sequence[tuple[str, float, float]]], floor: float) -> None:
    """Background against target accuracy; families with a strength are curves."""
    with run.figure("edits", figsize=(6.5, 4.4)) as (_, axes):
        markers = iter("osD^v<>Pp*Xhd")
        for family, points in families.items():
            accuracy, background = np.array([point[1:] for point in points]).T
            style = "-" if family.startswith("uni_edit") else ""
            width = 2.2 if family == "uni_edit" else 1
            axes.plot(accuracy, background, next(markers) + style, label=family, markersize=4, linewidth=width)
        axes.axvline(floor, color="grey", linestyle=":", linewidth=1)
        axes.set_xlabel("share of right halves taken for the target class")
        axes.set_ylabel("PSNR of the left half (dB)")
        axes.legend(fontsize=6)


def strips(run: Run, source: np.ndarray, masks: np.ndarray, edited: np.ndarray, titles: Sequence[str]) -> None:
    """One row a pair: source, the mask of every step, edit."""
    columns = masks.shape[0] + 2
    size = (1.3 * columns, 0.9 * len(source) + 0.3)
    with run.figure("strips", nrows=len(source), ncols=columns, squeeze=False, figsize=size) as (_, axes):
        for row, panels in enumerate(axes):
            pictures = [source[row], *masks[:, row], edited[row]]
            for k, (panel, picture) in enumerate(zip(panels, pictures, strict=True)):
                inside = 0 < k < columns - 1
                panel.imshow(picture[..., 0], cmap="magma" if inside else "gray", vmin=0 if inside else -1, vmax=1)
                panel.set_xticks([])
                panel.set_yticks([])
                if row == 0 and k < columns - 1:
                    panel.set_title(f"mask {k}" if inside else "source", fontsize=7)
            panels[0].set_ylabel(titles[row], fontsize=5)
        axes[0, -1].set_title("edit", fontsize=7)
