//! Two panels over one time axis, as in the paper's Fig. 3: what arrived, and what it cost.

use std::fmt::Write as _;

use super::Run;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const PANEL: f64 = 190.0;
const TOP: f64 = 40.0;
const BETWEEN: f64 = 40.0;
const HEIGHT: f64 = TOP + 2.0 * PANEL + BETWEEN + 45.0;

/// A panel of the plot.
struct Panel<'a> {
    title: &'a str,
    top: f64,
    points: Vec<(f64, f64)>,
    color: &'a str,
}

pub(super) fn svg(run: &Run) -> String {
    let last = run
        .phases
        .last()
        .map_or(0.0, |phase| phase.at_seconds + phase.command_ms / 1e3);
    let seconds = last + run.phase_seconds;
    let x = |time: f64| LEFT + time / seconds * (WIDTH - LEFT - RIGHT);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let every = run.throughput_every_seconds;
    let bytes = run.bytes.iter().enumerate();
    let panels = [
        Panel {
            title: "throughput, MB/s",
            top: TOP,
            points: bytes
                .map(|(slot, bytes)| ((slot as f64 + 0.5) * every, *bytes as f64 / every / 1e6))
                .filter(|(time, _)| *time <= seconds)
                .collect(),
            color: "#1f77b4",
        },
        Panel {
            title: "processor, % of one",
            top: TOP + PANEL + BETWEEN,
            points: run.processor.clone(),
            color: "#d62728",
        },
    ];
    for panel in &panels {
        draw(&mut out, panel, &x);
    }
    let bottom = TOP + 2.0 * PANEL + BETWEEN;
    for phase in &run.phases {
        let at = x(phase.at_seconds);
        line(
            &mut out,
            [at, TOP, at, bottom],
            "#888\" stroke-dasharray=\"4 3",
        );
        let middle = x(phase.at_seconds + run.phase_seconds / 2.0);
        text(&mut out, middle, TOP - 12.0, "middle", &phase.bump);
        let time = format!("{:.0}", phase.at_seconds);
        text(&mut out, at, bottom + 18.0, "middle", &time);
    }
    let end = format!("{seconds:.0}");
    text(&mut out, x(seconds), bottom + 18.0, "middle", &end);
    text(
        &mut out,
        x(seconds / 2.0),
        bottom + 36.0,
        "middle",
        "time, s",
    );
    out + "</svg>\n"
}

fn draw(out: &mut String, panel: &Panel<'_>, x: &impl Fn(f64) -> f64) {
    let highest = panel.points.iter().map(|(_, value)| *value);
    let step = round(highest.fold(1.0, f64::max) / 4.0);
    let y = |value: f64| panel.top + PANEL - value / (5.0 * step) * PANEL;
    for tick in 0..=5 {
        let value = f64::from(tick) * step;
        line(out, [LEFT, y(value), WIDTH - RIGHT, y(value)], "#ddd");
        text(out, LEFT - 6.0, y(value) + 4.0, "end", &value.to_string());
    }
    let (at, middle) = (16.0, panel.top + PANEL / 2.0);
    let title = panel.title;
    writeln!(
        out,
        "<text x=\"{at}\" y=\"{middle}\" text-anchor=\"middle\" \
         transform=\"rotate(-90 {at} {middle})\">{title}</text>"
    )
    .expect("a string takes it");
    let points = panel.points.iter();
    let points = points.map(|(time, value)| format!("{:.1},{:.1}", x(*time), y(*value)));
    let points: Vec<String> = points.collect();
    writeln!(
        out,
        "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" points=\"{}\"/>",
        panel.color,
        points.join(" ")
    )
    .expect("a string takes it");
}

/// The next of 1, 2, 5, 10, 20 and so on.
fn round(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    { steps.into_iter().find(|step| *step >= value) }.unwrap_or(10.0 * power)
}

fn line(out: &mut String, [x1, y1, x2, y2]: [f64; 4], stroke: &str) {
    writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{stroke}\"/>"
    )
    .expect("a string takes it");
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, content: &str) {
    writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>"
    )
    .expect("a string takes it");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_round() {
        for (value, rounded) in [(0.25, 0.5), (1.0, 1.0), (29.5, 50.0), (51.0, 100.0)] {
            assert_eq!(round(value), rounded);
        }
    }
}
