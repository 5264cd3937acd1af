//! Kato et al. 2019, Fig. 18: the rate at which files of 20 to 80 MB go over Ethernet and WLAN together.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use dibs_lab::dibs::{Dibsd, Settings};
use dibs_lab::load::{Throughput, Transport, accept, set_congestion};
use dibs_lab::plot::{BLUE, Curve, ORANGE, Panel, Plot, RED};
use dibs_lab::site::{Site, UNTRUSTED, addresses};
use dibs_lab::{Conditions, Lab, baseline};
use libaes::Cipher;
use serde_json::json;

use super::Stage;
use crate::finding::{Finding, Verdict};

/// Ethernet 100base-T, and what is left of 802.11g; bits a second.
const ETHERNET: u64 = 100_000_000;
const WLAN: u64 = 20_000_000;
const DELAYS: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(3)];
const MEGABYTE: u64 = 1_000_000;
const SIZES: [u64; 4] = [20, 40, 60, 80];
const TURNS: usize = 3;
const PORT: u16 = 7000;
const CONGESTION: &str = "cubic";
/// Bytes that are encrypted at once, and the bytes of them on the wire: CBC fills the last block.
const PIECE: usize = 16 << 10;
const KEY: [u8; 16] = *b"a key of the lab";
const IV: [u8; 16] = [9; 16];

/// A way to send a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Kernel MPTCP.
    Unprotected,
    /// dibs, as published.
    Scramble,
    /// The program encrypts what it sends by kernel MPTCP.
    Cipher,
    /// dibs, encrypting.
    Seal,
}

impl Way {
    const ALL: [Self; 4] = [Self::Unprotected, Self::Scramble, Self::Cipher, Self::Seal];

    fn name(self) -> &'static str {
        match self {
            Self::Unprotected => "unprotected multipath (MPTCP)",
            Self::Scramble => "scramble",
            Self::Cipher => "AES-128-CBC in software over MPTCP",
            Self::Seal => "seal",
        }
    }

    /// The paper's Mbit/s.
    fn paper(self) -> Option<f64> {
        match self {
            Self::Unprotected => Some(90.0),
            Self::Scramble => Some(75.0),
            Self::Cipher => Some(2.0),
            Self::Seal => None,
        }
    }

    fn color(self) -> &'static str {
        match self {
            Self::Unprotected => BLUE,
            Self::Scramble => ORANGE,
            Self::Cipher => RED,
            Self::Seal => "#7f5fb0",
        }
    }
}

/// Hosts and links of its own.
struct Place {
    way: Way,
    site: Site,
    _daemons: Option<[Dibsd; 2]>,
    _lab: Lab,
}

pub(super) fn run(stage: &Stage) -> Result<Finding> {
    let sizes = stage.pick(&SIZES[..], &SIZES[..2]);
    let turns = stage.pick(TURNS, 1);
    let mut series = Vec::new();
    for way in Way::ALL {
        let place = Place::new(stage, way).with_context(|| way.name())?;
        let rate = |&size: &u64| -> Result<(u64, f64)> {
            let rates = (0..turns).map(|_| place.send(size * MEGABYTE));
            let mut rates = rates.collect::<Result<Vec<f64>>>()?;
            rates.sort_by(f64::total_cmp);
            let median = rates[turns / 2];
            eprintln!("{}, {size} MB: {median:.1} Mbit/s", way.name());
            Ok((size, median))
        };
        let rates = sizes.iter().map(rate).collect::<Result<Vec<_>>>();
        series.push((way, rates.with_context(|| way.name())?));
    }
    Ok(finding(&series, turns))
}

fn finding(series: &[(Way, Vec<(u64, f64)>)], turns: usize) -> Finding {
    let mut finding = Finding {
        setup: format!(
            "Emulated links of 100 Mbit/s and 1 ms (trusted), and of 20 Mbit/s and 6 ms; CUBIC; the median of {turns} files \
             each, from the first byte to the last."
        ),
        data: json!(
            { series.iter() }
                .map(|(way, rates)| json!({"way": way.name(), "mbit_per_s_by_mb": rates}))
                .collect::<Vec<_>>()
        ),
        ..Finding::default()
    };
    let mean = |way: Way| {
        let (_, rates) = series.iter().find(|(one, _)| *one == way)?;
        Some(rates.iter().map(|(_, rate)| rate).sum::<f64>() / rates.len() as f64)
    };
    let unprotected = mean(Way::Unprotected).unwrap_or(f64::NAN);
    for way in Way::ALL {
        let rate = mean(way).unwrap_or(f64::NAN);
        let share = rate / unprotected;
        let verdict = match way {
            Way::Unprotected => Verdict::agrees_if(
                rate >= 0.9 * way.paper().unwrap_or_default(),
                "slower than the paper's",
            ),
            Way::Scramble => Verdict::agrees_if(
                share >= 75.0 / 90.0,
                "a smaller part of the unprotected rate than the paper's",
            ),
            Way::Cipher if share > 0.9 => Verdict::Incomparable(
                "today's processors encrypt in software faster than these links carry".to_owned(),
            ),
            Way::Cipher => {
                Verdict::agrees_if(share < 0.1, "neither so slow nor as fast as the links")
            }
            Way::Seal => Verdict::New,
        };
        let paper = way.paper();
        let paper = paper.map(|rate| format!("about {rate:.0} Mbit/s, {:.2}", rate / 90.0));
        finding.compare(
            &format!(
                "Fig. 18, {}: rate, and part of the unprotected one",
                way.name()
            ),
            [
                &paper.unwrap_or_else(|| "not measured".to_owned()),
                &format!("{rate:.0} Mbit/s, {share:.2}"),
            ],
            verdict,
        );
    }
    let curve = |(way, rates): &(Way, Vec<(u64, f64)>)| {
        let points = rates.iter().map(|(size, rate)| (*size as f64, *rate));
        Curve::new(way.name(), way.color(), points)
    };
    let plot = Plot {
        along: "size of the file, MB",
        end: SIZES[SIZES.len() - 1] as f64,
        panels: vec![Panel {
            title: "rate, Mbit/s".to_owned(),
            curves: series.iter().map(curve).collect(),
        }],
        marks: Vec::new(),
    };
    let caption = "Rate by size of the file, as in Fig. 18";
    finding.figure("files", caption, plot.to_string());
    let columns = series.first().map_or(&[][..], |(_, rates)| rates);
    let columns: Vec<String> = std::iter::once(String::new())
        .chain(columns.iter().map(|(size, _)| format!("{size} MB")))
        .collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let row = |(way, rates): &(Way, Vec<(u64, f64)>)| {
        let rates = rates.iter().map(|(_, rate)| format!("{rate:.1}"));
        std::iter::once(way.name().to_owned())
            .chain(rates)
            .collect()
    };
    finding.table("Mbit/s", &columns, series.iter().map(row).collect());
    finding
}

impl Place {
    fn new(stage: &Stage, way: Way) -> Result<Self> {
        let mut lab = Lab::new()?;
        let site = Site::new(&mut lab, ["a", "b"], 2, |interface, link| {
            let number = usize::from(interface == UNTRUSTED);
            let rate = [ETHERNET, WLAN][number];
            link.emulated(Conditions::new().rate(rate).delay(DELAYS[number]))
        })?;
        let bump = match way {
            Way::Unprotected | Way::Cipher => None,
            Way::Scramble => Some("scramble"),
            Way::Seal => Some("seal"),
        };
        let daemons = match bump {
            None => {
                baseline::mptcp(&site.a, &site.b, &[addresses(1)[1]])?;
                None
            }
            Some(bump) => {
                let rule = format!("[[rule]]\nbump = \"{bump}\"\ndport = {PORT}\n");
                let settings = [&rule[..], ""].map(|tables| Settings { daemon: "", tables });
                let programs = stage.programs()?;
                Some(programs.join([&site.a, &site.b], &Site::paths(2), settings)?)
            }
        };
        Ok(Self {
            way,
            site,
            _daemons: daemons,
            _lab: lab,
        })
    }

    /// Sends a file of so many bytes; returns Mbit/s.
    fn send(&self, bytes: u64) -> Result<f64> {
        let (a, b) = (&self.site.a, &self.site.b);
        let to = SocketAddr::new(addresses(0)[1], PORT);
        let transport = match self.way {
            Way::Unprotected | Way::Cipher => Transport::Mptcp,
            Way::Scramble | Way::Seal => Transport::Tcp,
        };
        if self.way != Way::Cipher {
            let load = Throughput::new(to)
                .transport(transport)
                .congestion(CONGESTION);
            return Ok(load.bytes(bytes).run(a, b)?.bits_per_second / 1e6);
        }
        let listener = transport.listen(b, to)?;
        let near = transport.connect(a, to)?;
        set_congestion(&near, CONGESTION)?;
        let far = accept(&listener)?;
        let start = Instant::now();
        let sender = a.thread("sender", move || encrypted(near, bytes))?;
        let decrypted = decrypted(far)?;
        let took = start.elapsed();
        sender
            .join()
            .map_err(|_| anyhow!("the sender panicked"))??;
        ensure!(decrypted == bytes, "{decrypted} of {bytes} bytes arrived");
        Ok(bytes as f64 * 8.0 / took.as_secs_f64() / 1e6)
    }
}

/// A byte of the file.
const fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn encrypted(mut stream: TcpStream, bytes: u64) -> Result<()> {
    let cipher = Cipher::new_128(&KEY);
    let mut sent = 0;
    while sent < bytes {
        let until = bytes.min(sent + PIECE as u64);
        let piece: Vec<u8> = (sent..until).map(byte).collect();
        let piece = cipher.cbc_encrypt(&IV, &piece);
        stream.write_all(&piece).context("send")?;
        sent = until;
    }
    Ok(())
}

/// Takes what is sent to the end; returns how many bytes it was.
fn decrypted(stream: TcpStream) -> Result<u64> {
    let cipher = Cipher::new_128(&KEY);
    let mut received = 0;
    loop {
        let mut piece = Vec::new();
        // Each piece but the last one is filled by one block.
        let mut part = (&stream).take(PIECE as u64 + 16);
        part.read_to_end(&mut piece).context("receive")?;
        if piece.is_empty() {
            return Ok(received);
        }
        let piece = cipher.cbc_decrypt(&IV, &piece);
        for (at, is) in (received..).zip(&piece) {
            ensure!(byte(at) == *is, "byte {at} is another one");
        }
        received += piece.len() as u64;
    }
}
