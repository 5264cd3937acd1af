//! Pictures: panels over one axis, as SVG. In a page that sets `--paper`, `--ink` and `--line` they take its colours.

use std::fmt::{self, Write as _};

const WIDTH: f64 = 900.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const PANEL: f64 = 190.0;
const TOP: f64 = 40.0;
const BETWEEN: f64 = 40.0;
/// What text is drawn with.
const INK: &str = "fill=\"black\" style=\"fill:var(--ink,black)\"";

/// One of the colours that stay apart for who cannot tell red from green.
pub const BLUE: &str = "#1f77b4";
/// Another one.
pub const RED: &str = "#d62728";
/// Another one.
pub const ORANGE: &str = "#ff7f0e";

/// Plot of curves along a common axis.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Unit of the common axis, which begins at 0.
    pub along: &'static str,
    /// Its end.
    pub end: f64,
    /// One below the other.
    pub panels: Vec<Panel>,
    /// Places where something happened, and what came then.
    pub marks: Vec<Mark>,
}

/// A vertical axis, and what is drawn over it.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Unit that it counts, from 0 on.
    pub title: String,
    /// At least one.
    pub curves: Vec<Curve>,
}

/// Values along the axis.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Named in the panel, if it is not alone there.
    pub name: String,
    /// As SVG names it.
    pub color: &'static str,
    /// Places and values.
    pub points: Vec<(f64, f64)>,
}

/// A place on the axis.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Place on the common axis.
    pub at: f64,
    /// Words for what is so from there on; nothing where only the place is to be read.
    pub label: String,
    /// For so long.
    pub length: f64,
}

impl Panel {
    /// One with a single curve, which needs no name.
    pub fn of(
        title: &str,
        color: &'static str,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Self {
        Self {
            title: title.to_owned(),
            curves: vec![Curve::new(title, color, points)],
        }
    }
}

impl Curve {
    /// By places and values.
    pub fn new(
        name: &str,
        color: &'static str,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            color,
            points: points.into_iter().collect(),
        }
    }
}

/// The places in the middle of intervals of this length, with their values.
pub fn by_interval(
    every: f64,
    values: impl IntoIterator<Item = f64>,
) -> impl Iterator<Item = (f64, f64)> {
    let middles = (0u32..).map(move |slot| (f64::from(slot) + 0.5) * every);
    middles.zip(values)
}

/// As SVG.
impl fmt::Display for Plot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let panels = self.panels.len() as f64;
        let bottom = TOP + panels * PANEL + (panels - 1.0) * BETWEEN;
        let height = bottom + 45.0;
        let end = self.end.max(f64::MIN_POSITIVE);
        let x = |place: f64| LEFT + place / end * (WIDTH - LEFT - RIGHT);
        let named = |place: f64| match end >= 10.0 {
            true => format!("{place:.0}"),
            false => ((place * 100.0).round() / 100.0).to_string(),
        };
        f.write_str(&opening(height))?;
        for (at, panel) in self.panels.iter().enumerate() {
            draw(f, panel, TOP + at as f64 * (PANEL + BETWEEN), &x)?;
        }
        for mark in &self.marks {
            let at = x(mark.at);
            line(
                f,
                [at, TOP, at, bottom],
                "stroke=\"#888\" stroke-dasharray=\"4 3\"",
            )?;
            let middle = x(mark.at + mark.length / 2.0);
            text(f, [middle, TOP - 12.0], ("middle", INK), &mark.label)?;
            text(f, [at, bottom + 18.0], ("middle", INK), &named(mark.at))?;
        }
        text(f, [x(end), bottom + 18.0], ("middle", INK), &named(end))?;
        text(
            f,
            [x(end / 2.0), bottom + 36.0],
            ("middle", INK),
            self.along,
        )?;
        writeln!(f, "</svg>")
    }
}

/// Groups of horizontal bars, each with its unit, from 0 on, and by name, as SVG.
pub fn bars(groups: &[(&str, Vec<(&str, f64)>)]) -> String {
    const BAR: f64 = 20.0;
    const NAMES: f64 = 260.0;
    let lines = { groups.iter() }.map(|(_, bars)| bars.len() as f64 + 2.0);
    let height = BAR * lines.sum::<f64>();
    let mut svg = opening(height);
    let mut y = 0.0;
    let put = |drawn: fmt::Result| drawn.expect("a string takes all");
    for (unit, bars) in groups {
        y += BAR;
        put(text(&mut svg, [NAMES, y], ("start", INK), unit));
        let highest = bars
            .iter()
            .map(|(_, value)| *value)
            .fold(f64::MIN_POSITIVE, f64::max);
        for (name, value) in bars {
            y += BAR;
            let long = value / highest * (WIDTH - NAMES - LEFT);
            // The last one is what the others are beside.
            let color = if *name == bars.last().map_or("", |(name, _)| name) {
                BLUE
            } else {
                "#999"
            };
            put(writeln!(
                svg,
                "<rect x=\"{NAMES}\" y=\"{:.1}\" width=\"{long:.1}\" height=\"14\" fill=\"{color}\"/>",
                y - 11.0
            ));
            put(text(&mut svg, [NAMES - 8.0, y], ("end", INK), name));
            put(text(
                &mut svg,
                [NAMES + long + 6.0, y],
                ("start", INK),
                &value.to_string(),
            ));
        }
        y += BAR;
    }
    svg + "</svg>\n"
}

/// Beginning of a picture of this height, with its paper.
fn opening(height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\" style=\"fill:var(--paper,white)\"/>\n"
    )
}

fn draw(
    f: &mut fmt::Formatter<'_>,
    panel: &Panel,
    top: f64,
    x: &impl Fn(f64) -> f64,
) -> fmt::Result {
    let values = panel.curves.iter().flat_map(|curve| &curve.points);
    let highest = values.map(|(_, value)| *value).fold(1.0, f64::max);
    let is_named = panel.curves.len() > 1;
    // Room for the names above the curves.
    let names = if is_named { panel.curves.len() } else { 0 };
    let step = round(highest / (1.0 - 0.09 * names as f64) / 5.0);
    let y = |value: f64| top + PANEL - value / (5.0 * step) * PANEL;
    for tick in 0..=5 {
        let value = f64::from(tick) * step;
        let grid = "stroke=\"#ddd\" style=\"stroke:var(--line,#ddd)\"";
        line(f, [LEFT, y(value), WIDTH - RIGHT, y(value)], grid)?;
        text(
            f,
            [LEFT - 6.0, y(value) + 4.0],
            ("end", INK),
            &value.to_string(),
        )?;
    }
    let middle = top + PANEL / 2.0;
    let turned = format!("transform=\"rotate(-90 16 {middle})\" {INK}");
    text(f, [16.0, middle], ("middle", &turned), &panel.title)?;
    for (number, curve) in panel.curves.iter().enumerate() {
        let color = curve.color;
        write!(
            f,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\""
        )?;
        for (at, value) in &curve.points {
            write!(f, "{:.1},{:.1} ", x(*at), y(*value))?;
        }
        writeln!(f, "\"/>")?;
        if is_named {
            let at = [WIDTH - RIGHT - 8.0, top + 16.0 * (number as f64 + 1.0)];
            text(f, at, ("end", &format!("fill=\"{color}\"")), &curve.name)?;
        }
    }
    Ok(())
}

/// The next of 1, 2, 2.5, 5, 10, 20 and so on.
fn round(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0].map(|step| step * power);
    { steps.into_iter().find(|step| *step >= value) }.unwrap_or(10.0 * power)
}

fn line(f: &mut fmt::Formatter<'_>, [x1, y1, x2, y2]: [f64; 4], stroke: &str) -> fmt::Result {
    writeln!(
        f,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" {stroke}/>"
    )
}

fn text(
    f: &mut impl fmt::Write,
    [x, y]: [f64; 2],
    (anchor, style): (&str, &str),
    content: &str,
) -> fmt::Result {
    writeln!(
        f,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {style}>{content}</text>"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_round() {
        for (value, rounded) in [(0.21, 0.25), (1.0, 1.0), (29.5, 50.0), (51.0, 100.0)] {
            assert_eq!(round(value), rounded);
        }
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let svg = bars(&[("rate", vec![("one", 50.0), ("other", 100.0)])]);
        for drawn in [
            ">rate<",
            "width=\"285.0\"",
            "width=\"570.0\"",
            ">50<",
            ">100<",
        ] {
            assert!(svg.contains(drawn), "{drawn}: {svg}");
        }
    }

    #[test]
    fn each_curve_is_drawn_and_named_beside_others() {
        let curve = |name: &str| Curve::new(name, BLUE, [(0.0, 1.0), (1.0, 2.0)]);
        let plot = Plot {
            along: "time, s",
            end: 2.0,
            panels: vec![Panel {
                title: "rate".to_owned(),
                curves: vec![curve("one"), curve("other")],
            }],
            marks: vec![Mark {
                at: 1.0,
                label: "preferred".to_owned(),
                length: 1.0,
            }],
        };
        let svg = plot.to_string();
        assert_eq!(svg.matches("<polyline").count(), 2);
        for word in ["one", "other", "preferred", "rate"] {
            assert!(svg.contains(&format!(">{word}</text>")), "{word}: {svg}");
        }
    }
}
