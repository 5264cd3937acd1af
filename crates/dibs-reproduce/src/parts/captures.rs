//! Kato et al. 2019, Fig. 13 to 17: the first data on the untrusted path, without and with scrambling.

use anyhow::{Context as _, Result};
use dibs_eavesdrop::{CLEAR, Link, Packet, Payload, hex, place};
use dibs_lab::Recording;
use serde_json::json;

use super::Stage;
use super::scene::{Label, Scene, Way};
use crate::finding::{Finding, Verdict};
use crate::screen;

/// What iperf sends.
const DIGITS: &[u8; 10] = b"0123456789";
/// What comes of it, from the 64th byte on.
const SCRAMBLED_DIGITS: &[u8] = b"72941638507294163850";
/// The figure's file is not published; this is another text.
const TEXT: &[u8] = include_bytes!("../../../dibs-eavesdrop/tests/texts/gettysburg.txt");
const WORDS: &[u8] = b"conceived in Liberty";
/// Bytes that are sent of either.
const LENGTH: usize = 200_000;
/// Bytes of payload from which on it carries data.
const DATA: usize = 400;
/// Lines that are shown.
const LINES: usize = 8;
/// The same in the picture of all.
const FEW: usize = 5;

pub(super) fn run(stage: &Stage) -> Result<Finding> {
    let scene = Scene::new(&stage.programs()?, 0.05, Label::True)?;
    let digits: Vec<u8> = DIGITS.iter().copied().cycle().take(LENGTH).collect();
    let text: Vec<u8> = TEXT.iter().copied().cycle().take(LENGTH).collect();
    let mut finding = Finding {
        setup: "One connection each from host a to host b; heard at b's end of the untrusted link. Shown is the first data \
                segment, from its TCP payload on, or the first datagram with data, from behind its clear header on."
            .to_owned(),
        ..Finding::default()
    };
    let mut data = serde_json::Map::new();
    let mut views = Vec::new();
    for (content, bytes, figures) in [
        ("iperf's digits", &digits, ["Fig. 13", "Fig. 14"]),
        ("a text", &text, ["Fig. 16", "Fig. 17"]),
    ] {
        for (way, figure) in [Way::Plain, Way::Scramble].into_iter().zip(figures) {
            let recording = scene.overhear(way, bytes)?;
            let heard = heard(&recording, way);
            let first = heard.first().context("no data passed the untrusted link")?;
            let all = heard.concat();
            let shown = hex(first, LINES);
            judge(&mut finding, figure, &all);
            match figure {
                "Fig. 16" => views.push(("A text in plain", hex(first, FEW))),
                "Fig. 17" => views.push(("The same on scramble", hex(first, FEW))),
                _ => {}
            }
            finding.capture(
                &format!("{figure}: {content}, {}", way.name()),
                shown.clone(),
            );
            data.insert(format!("{figure}, {content}, {}", way.name()), json!(shown));
        }
    }
    let sealed = scene.overhear(Way::Seal, &text)?;
    let sealed = heard(&sealed, Way::Seal);
    let sealed = sealed
        .first()
        .context("nothing sealed passed the untrusted link")?;
    views.push(("The same on seal", hex(sealed, FEW)));
    finding.figure(
        "view",
        "What someone on the untrusted path sees of a text",
        screen::svg(&views),
    );
    finding.compare(
        "Fig. 15, the file as the receiver has it",
        ["as it was sent", "as it was sent, in all connections"],
        Verdict::Agrees,
    );
    finding.say(
        "The first 64 bytes of a stream's scrambled digits depend on the key; from then on they repeat with a period of ten, \
         as the paper shows them.",
    );
    finding.data = data.into();
    Ok(finding)
}

fn judge(finding: &mut Finding, figure: &str, all: &[u8]) {
    let has = |needle: &[u8]| all.windows(needle.len()).any(|window| window == needle);
    match figure {
        "Fig. 13" => finding.compare(
            "Fig. 13, iperf without scrambling",
            ["0123456789 repeated", found(has(DIGITS), "the same")],
            Verdict::agrees_if(has(DIGITS), "the digits are not there"),
        ),
        "Fig. 14" => finding.compare(
            "Fig. 14, iperf with scrambling",
            [
                "7294163850 repeated",
                found(has(SCRAMBLED_DIGITS), "the same"),
            ],
            Verdict::agrees_if(has(SCRAMBLED_DIGITS), "other digits, or none"),
        ),
        "Fig. 16" => finding.compare(
            "Fig. 16, a text file without scrambling",
            ["can be read", found(has(WORDS), "can be read")],
            Verdict::agrees_if(has(WORDS), "it cannot be read"),
        ),
        _ => {
            // XOR 0 is the text itself.
            let shifted = |constant: u8| WORDS.iter().map(move |byte| byte ^ constant);
            let hidden = (0..=255).all(|constant| !has(&shifted(constant).collect::<Vec<u8>>()));
            // By the scheme's own equation, with no key.
            let as_published = place(all, &TEXT.repeat(2)).is_some();
            let why = match hidden && as_published {
                true => "the published capture is not what the scheme gives; this one is",
                false => "neither is what the scheme gives",
            };
            finding.compare(
                "Fig. 17, a text file with scrambling",
                [
                    "the text XOR the constant 0x5a",
                    found(
                        hidden && as_published,
                        "the text as the scheme sends it, and not its XOR with any one byte",
                    ),
                ],
                Verdict::Differs(why.to_owned()),
            );
        }
    }
}

const fn found(is_so: bool, what: &str) -> &str {
    if is_so { what } else { "something else" }
}

/// The payloads with data, as far as an eavesdropper looks into them.
fn heard(recording: &Recording, way: Way) -> Vec<Vec<u8>> {
    let packets = recording.packets.iter().filter(|packet| !packet.outgoing);
    let payloads = packets.filter_map(|packet| Packet::of(Link::Ethernet, &packet.frame));
    let payloads = payloads.filter_map(|packet| match packet.payload {
        Payload::Tcp(bytes) if way == Way::Plain => Some(bytes.to_vec()),
        Payload::Udp(bytes) if way != Way::Plain => bytes.get(CLEAR..).map(<[u8]>::to_vec),
        _ => None,
    });
    payloads.filter(|bytes| bytes.len() >= DATA).collect()
}
