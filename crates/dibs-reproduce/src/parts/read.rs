//! What someone recovers who hears the untrusted path and nothing else, by bump, kind of content and `trusted_share`.

use anyhow::{Context as _, Result};
use dibs_eavesdrop::{Attacker, Report, Statistics, text};
use dibs_lab::plot::{BLUE, Mark, Panel, Plot};
use serde::Serialize;
use serde_json::json;

use super::Stage;
use super::scene::{Label, Scene, Way, tap};
use crate::finding::{Finding, Verdict};

/// Texts that the attack's statistics were not made from.
const TEXTS: [(&str, &[u8]); 5] = [
    (
        "English",
        include_bytes!("../../../dibs-eavesdrop/tests/texts/english.txt"),
    ),
    (
        "HTTP and HTML",
        include_bytes!("../../../dibs-eavesdrop/tests/texts/http.txt"),
    ),
    (
        "JSON",
        include_bytes!("../../../dibs-eavesdrop/tests/texts/json.txt"),
    ),
    (
        "source code",
        include_bytes!("../../../dibs-eavesdrop/tests/texts/source.txt"),
    ),
    (
        "PostgreSQL's protocol",
        include_bytes!("../../../dibs-eavesdrop/tests/texts/postgres.bin"),
    ),
];
/// Of the daemons' own setting.
const USUAL_SHARE: f64 = 0.05;
const SHARES: [f64; 6] = [0.0, 0.05, 0.1, 0.2, 0.35, 0.5];
/// Bytes of recovered text that are shown.
const SHOWN: usize = 700;
/// By so many bytes it is found where recovered text belongs.
const NEEDLE: usize = 24;
/// In about so many places.
const ANCHORS: usize = 16;
/// Bytes of a datagram behind its clear header that are none of the text, about.
const HEADER: u64 = 40;

/// What was recovered of one connection.
struct Recovered {
    gained: Gained,
    statistics: Statistics,
    /// How the recovered text begins.
    sample: Option<String>,
}

/// Parts of all bytes sent.
#[derive(Serialize)]
struct Gained {
    /// What passed him.
    passed: f64,
    /// What he has right.
    right: f64,
    /// What he says to be certain of.
    certain: f64,
}

pub(super) fn run(stage: &Stage) -> Result<Finding> {
    let programs = stage.programs()?;
    let attacker = Attacker::new();
    let length = stage.pick(300_000, 100_000);
    let mut finding = Finding {
        setup: format!(
            "A text of each kind, repeated to {length} bytes, from host a to host b by a connection of its own. The \
             eavesdropper has what arrives by the untrusted link, and statistics of other texts. Recovered is what he has \
             right, in per cent of all that was sent, what went by the trusted path included; trusted_share is {USUAL_SHARE}."
        ),
        ..Finding::default()
    };
    let mut data = Vec::new();
    let mut rows = Vec::new();
    let mut worst = Vec::new();
    let scene = Scene::new(&programs, USUAL_SHARE, Label::True)?;
    for way in Way::ALL {
        let mut least = f64::INFINITY;
        let mut most = 0f64;
        let mut passed = 0f64;
        for (kind, content) in TEXTS {
            let of = || format!("{} on {}", kind, way.name());
            let got = overhear(&scene, &attacker, way, content, length).with_context(of)?;
            let gained = got.gained;
            (least, most) = (least.min(gained.right), most.max(gained.right));
            passed = passed.max(gained.passed);
            let Statistics {
                printable,
                entropy,
                chi_square,
                repeated,
                ..
            } = got.statistics;
            rows.push(vec![
                format!("{}, {kind}", way.name()),
                format!("{:.0}", printable * 100.0),
                format!("{entropy:.2}"),
                format!("{chi_square:.0}"),
                format!("{:.0}", repeated * 100.0),
                format!("{:.0}", gained.passed * 100.0),
                format!("{:.1}", gained.right * 100.0),
                format!("{:.1}", gained.certain * 100.0),
            ]);
            data.push(json!({
                "bump": way.name(), "content": kind, "passed": gained.passed, "recovered": gained.right, "certain": gained.certain,
                "statistics": got.statistics,
            }));
            if let (Way::Scramble, "English", Some(sample)) = (way, kind, got.sample) {
                finding.capture("What he reads of the English text on scramble", sample);
            }
        }
        worst.push((way, [least, most, passed]));
    }
    finding.table(
        "What the bytes on the untrusted path look like, and what is recovered",
        &[
            "",
            "printable, %",
            "entropy, bits",
            "chi-square",
            "repeated, %",
            "passed there, %",
            "recovered, %",
            "certain, %",
        ],
        rows,
    );
    for (way, parts) in worst {
        judge(&mut finding, way, parts);
    }
    drop(scene);
    let false_label = mislabelled(stage, &attacker, length)?;
    draw_mislabelled(&mut finding, &false_label);
    let curve = curve(stage, &attacker, length)?;
    draw(&mut finding, &curve);
    finding.data = json!({"bumps": data, "false_label": false_label, "trusted_share": curve});
    Ok(finding)
}

fn judge(finding: &mut Finding, way: Way, [least, most, passed]: [f64; 3]) {
    let [from, to, passed] = [least, most, passed].map(|part| format!("{:.0}", part * 100.0));
    let recovered = match from == to {
        true => to,
        false => format!("{from} to {to}"),
    };
    let ours =
        format!("{recovered} % recovered of what was sent, of which up to {passed} % passed there");
    let (paper, verdict) = match way {
        Way::Plain => ("all", Verdict::agrees_if(least > 0.99, "not all")),
        Way::Scramble => (
            "nothing: not every path, not any of the data",
            Verdict::agrees_if(
                most == 0.0,
                "text is redundant, and consecutive bytes tell how it goes on",
            ),
        ),
        Way::Share | Way::Seal => ("not in these papers", Verdict::New),
    };
    let of = format!("{}, from the untrusted path alone", way.name());
    finding.compare(&of, [paper, &ours], verdict);
}

/// What is recovered of the English text where the hosts call his link trusted, by bump.
fn mislabelled(
    stage: &Stage,
    attacker: &Attacker,
    length: usize,
) -> Result<Vec<(&'static str, Gained)>> {
    let programs = stage.programs()?;
    let (_, english) = TEXTS[0];
    let scene = Scene::new(&programs, USUAL_SHARE, Label::False)?;
    let of = |way: Way| {
        let got = overhear(&scene, attacker, way, english, length)
            .with_context(|| format!("{} by a link with a false label", way.name()))?;
        anyhow::Ok((way.name(), got.gained))
    };
    [Way::Scramble, Way::Share, Way::Seal]
        .into_iter()
        .map(of)
        .collect()
}

fn draw_mislabelled(finding: &mut Finding, gained: &[(&'static str, Gained)]) {
    let row = |(name, gained): &(&'static str, Gained)| {
        let parts = [gained.passed, gained.right, gained.certain];
        let parts = parts.map(|part| format!("{:.1}", part * 100.0));
        [vec![(*name).to_owned()], parts.to_vec()].concat()
    };
    finding.table(
        "A false label: the hosts call the link trusted that he listens to. English text",
        &["", "passed there, %", "recovered, %", "certain, %"],
        gained.iter().map(row).collect(),
    );
    let right = |way: Way| {
        let found = gained.iter().find(|(name, _)| *name == way.name());
        found.map_or(f64::NAN, |(_, gained)| gained.right * 100.0)
    };
    finding.compare(
        "A path called trusted that is not",
        [
            "not in these papers",
            &format!(
                "scramble {:.0} % recovered, share {:.0} %, seal {:.0} %",
                right(Way::Scramble),
                right(Way::Share),
                right(Way::Seal)
            ),
        ],
        Verdict::New,
    );
}

/// Recovered of the English text on scramble, by `trusted_share`.
fn curve(stage: &Stage, attacker: &Attacker, length: usize) -> Result<Vec<(f64, f64)>> {
    let programs = stage.programs()?;
    let (_, english) = TEXTS[0];
    let point = |share: f64| {
        let scene = Scene::new(&programs, share, Label::True)?;
        let got = overhear(&scene, attacker, Way::Scramble, english, length)?;
        anyhow::Ok((share, got.gained.right))
    };
    let named = |share: &f64| point(*share).with_context(|| format!("trusted_share {share}"));
    SHARES.iter().map(named).collect()
}

fn draw(finding: &mut Finding, curve: &[(f64, f64)]) {
    let percent = curve.iter().map(|(share, right)| (*share, right * 100.0));
    let plot = Plot {
        along: "trusted_share",
        end: SHARES[SHARES.len() - 1],
        panels: vec![Panel::of("recovered, %", BLUE, percent)],
        marks: { SHARES[1..SHARES.len() - 1].iter() }
            .map(|&at| Mark {
                at,
                label: String::new(),
                length: 0.0,
            })
            .collect(),
    };
    finding.figure(
        "trusted-share",
        "English text on scramble: what is recovered from the untrusted path alone, by the part that only trusted paths \
         carry. What goes by the trusted path is gone for him but for the last 64 bytes of each gap; of the rest he reads \
         what stands in runs that are long enough.",
        plot.to_string(),
    );
    let cells =
        |(share, right): &(f64, f64)| vec![share.to_string(), format!("{:.1}", right * 100.0)];
    finding.table(
        "The same in figures",
        &["trusted_share", "recovered, %"],
        curve.iter().map(cells).collect(),
    );
}

fn overhear(
    scene: &Scene,
    attacker: &Attacker,
    way: Way,
    content: &[u8],
    length: usize,
) -> Result<Recovered> {
    let sent: Vec<u8> = content.iter().copied().cycle().take(length).collect();
    let recording = scene.overhear(way, &sent)?;
    let report = tap(&recording).report(attacker, &[]);
    Ok(match way {
        Way::Plain => Recovered {
            gained: Gained {
                passed: 1.0,
                right: report.plain.bytes as f64 / length as f64,
                certain: report.plain.bytes as f64 / length as f64,
            },
            statistics: report.plain.statistics,
            sample: None,
        },
        _ => recovered(&report, content, length),
    })
}

fn recovered(report: &Report, content: &[u8], length: usize) -> Recovered {
    // The other way there are acknowledgements only.
    let data = report.directions.iter().max_by_key(|way| way.bytes);
    let pieces = || data.into_iter().flat_map(|way| &way.pieces);
    let right: usize = pieces().map(|piece| right(&piece.bytes, content)).sum();
    let certain = data.map_or(0, |way| way.certain);
    let longest = pieces().max_by_key(|piece| piece.bytes.len());
    let passed = data.map_or(0, |way| {
        way.statistics.bytes.saturating_sub(HEADER * way.datagrams)
    });
    let part = |bytes: u64| (bytes as f64 / length as f64).min(1.0);
    Recovered {
        gained: Gained {
            passed: part(passed),
            right: part(right as u64),
            certain: part(certain),
        },
        statistics: data.map(|way| way.statistics).unwrap_or_default(),
        sample: longest.map(|piece| {
            let shown = &piece.bytes[..piece.bytes.len().min(SHOWN)];
            text(shown, &piece.uncertain)
        }),
    }
}

/// How many bytes of a piece are those of the text, which was sent again and again. Where in it the piece stands is seen
/// by some bytes in several places of it: parts of the text may stand in it more than once.
fn right(piece: &[u8], content: &[u8]) -> usize {
    let twice = content.repeat(2);
    let apart = (piece.len() / ANCHORS).max(1);
    let anchors = piece.windows(NEEDLE).enumerate().step_by(apart);
    let places = anchors.filter_map(|(at, needle)| {
        let found = twice.windows(NEEDLE).position(|window| window == needle)?;
        Some((found + content.len() * piece.len() - at) % content.len())
    });
    let agreeing = |place: usize| {
        let truth = content.iter().cycle().skip(place);
        piece.iter().zip(truth).filter(|(a, b)| a == b).count()
    };
    places.map(agreeing).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_count_as_right_where_they_stand_in_the_text() {
        let (_, content) = TEXTS[0];
        let sent: Vec<u8> = content
            .iter()
            .copied()
            .cycle()
            .skip(3000)
            .take(1000)
            .collect();
        assert_eq!(right(&sent, content), 1000);
        let mut wrong = sent.clone();
        for byte in wrong.iter_mut().step_by(65) {
            *byte ^= 1;
        }
        assert_eq!(right(&wrong, content), 1000 - 16);
        assert_eq!(right(&[7; 1000], content), 0);
        assert_eq!(right(&[], content), 0);
    }
}
