//! The demonstration: a file on its way over one TCP connection, into which the scrambler is put
//! and taken out again, while somebody listens on the untrusted link.

mod eavesdropper;
mod screen;
mod text;
mod transfer;

use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};
use dibs_control::Changed;

use self::eavesdropper::{InForce, Overheard, study};
use self::screen::{Sample, Screen};
use self::text::Sum;
use self::transfer::Transfer;
use crate::capture::Capture;
use crate::dibs::{Dibsd, Programs, Settings};
use crate::lab::Lab;
use crate::site::{INTERFACES, Site, TRUSTED, UNTRUSTED, addresses};

/// Bits per second of each link.
const RATE: u64 = 500_000_000;
const PORT: u16 = 7000;
/// Lines of a dump.
const LINES: usize = 6;
const SAMPLE: Duration = Duration::from_millis(100);
/// What the untrusted link had queued before the bump came may pass for as long.
const QUEUED: Duration = Duration::from_millis(250);

/// Runs it with a text of so many MiB, on standard output. Call [`enter`](crate::enter) before.
///
/// # Errors
/// If anything is not as promised: the connection broke, another file arrived, the eavesdropper
/// could not read before, or could while the bump was in force.
pub fn run(programs: &Programs, mebibytes: u32) -> Result<()> {
    let size = u64::from(mebibytes) << 20;
    let mut lab = Lab::new()?;
    let site = Site::new(&mut lab, ["laptop", "server"], 2, |_, link| {
        link.shaped(RATE)
    })?;
    let mut out = io::stdout();
    let rate = RATE / 1_000_000;
    let [[trusted, _], [near, far]] = [addresses(0), addresses(1)];
    writeln!(
        out,
        "Two hosts, laptop and server, in network namespaces of their own; two links of {rate} Mbit/s:\n  \
         eth0   {trusted}  trusted\n  wlan0  {near}  untrusted: somebody listens\n\
         dibsd on both ..."
    )?;
    let [laptop, _server] = programs.join(
        [&site.a, &site.b],
        &Site::paths(2),
        [Settings::default(); 2],
    )?;
    writeln!(out, "A text of {mebibytes} MiB ...")?;
    let (mut source, target) = (scratch_file(size)?, scratch_file(size)?);
    let sent = text::write(&source, size).with_context(|| scratch_hint(size))?;
    source.rewind()?;

    let listening = Capture::start_heads(&site.b, UNTRUSTED)?;
    let address = SocketAddr::new(far, PORT);
    let transfer = Transfer::start(&site.a, source, &site.b, target, address)?;
    let from = transfer.from;
    let mut show = Show {
        screen: Screen::new(size)?,
        site: &site,
        laptop: &laptop,
        transfer: &transfer,
        bump: "plain".to_owned(),
        began: links(&site)?,
        size,
    };
    show.screen
        .event(&format!("one connection, {from} -> {address}, plain"))?;
    let legs = show.direct()?;
    let [at_enable, at_disable] = legs.links;
    let at_start = show.began;
    show.screen.finish();
    let received = transfer.finish()?;
    let at_end = links(&site)?;
    let mut file = received.file;
    let arrived = text::sum(&mut file)?;

    let seconds = received.duration.as_secs_f64();
    writeln!(
        out,
        "Received in {seconds:.1} s, {:.0} Mbit/s on average.\n",
        size as f64 * 8.0 / seconds / 1e6
    )?;
    let overheard = overheard(listening, legs.bump)?;
    tell(&overheard)?;
    writeln!(out, "\nBytes by link, headers and all:")?;
    for (name, [from, to]) in [
        ("plain", [at_start, at_enable]),
        ("scramble", [at_enable, at_disable]),
        ("plain", [at_disable, at_end]),
    ] {
        let [eth, wlan] = [0, 1].map(|link| (to[link] - from[link]) / 1_000_000);
        writeln!(out, "  {name:<8}  eth0 {eth:>5} MB   wlan0 {wlan:>5} MB")?;
    }
    writeln!(
        out,
        "TCP retransmissions: {}\nLongest stall: {:.1} ms\n\
         SHA-256 sent      {}\nSHA-256 received  {}",
        received.retransmissions,
        received.longest_stall.as_secs_f64() * 1e3,
        hexadecimal(&sent),
        hexadecimal(&arrived)
    )?;
    judge(&overheard, sent == arrived, [at_enable, at_disable])
}

/// The transfer as it is shown and steered.
struct Show<'a> {
    screen: Screen,
    site: &'a Site,
    laptop: &'a Dibsd,
    transfer: &'a Transfer,
    bump: String,
    began: [u64; 2],
    /// Bytes of the text.
    size: u64,
}

/// The moments of the switches.
struct Legs {
    bump: InForce,
    /// Counters of the links at the switches.
    links: [[u64; 2]; 2],
}

impl Show<'_> {
    /// Puts the bump in after a quarter of the file, and takes it out after three.
    fn direct(&mut self) -> Result<Legs> {
        self.watch_until(self.size / 4)?;
        let before = links(self.site)?;
        let port = PORT.to_string();
        self.switch(&["enable", "--dport", &port, "--bump", "scramble"])?;
        let from = SystemTime::now();
        self.watch_until(self.size / 4 * 3)?;
        let to = SystemTime::now();
        let after = links(self.site)?;
        self.switch(&["disable", "--dport", &port])?;
        self.watch_until(self.size)?;
        Ok(Legs {
            bump: InForce { from, to },
            links: [before, after],
        })
    }

    /// Shows the transfer until so much was received.
    fn watch_until(&mut self, received: u64) -> Result<()> {
        loop {
            // Asked before counting, so that the last bytes before the end are counted.
            let running = self.transfer.is_running();
            let sample = Sample {
                received: self.transfer.received(),
                bump: &self.bump,
                links: since(self.began, links(self.site)?),
                retransmissions: self.transfer.retransmissions()?,
            };
            self.screen.show(sample)?;
            if sample.received >= received {
                return Ok(());
            }
            // How it ended is told by `finish`; of the switches, none is left out.
            ensure!(
                running,
                "the transfer ended after {} of {} bytes",
                sample.received,
                self.size
            );
            std::thread::sleep(SAMPLE);
        }
    }

    fn switch(&mut self, words: &[&str]) -> Result<()> {
        let asked = Instant::now();
        let changed: Changed = self.laptop.ctl(words)?;
        let took = asked.elapsed().as_secs_f64() * 1e3;
        ensure!(
            changed.connections.len() == 1,
            "dibsctl {} changed {} connections instead of one",
            words.join(" "),
            changed.connections.len()
        );
        let line = format!(
            "laptop# dibsctl {}   [{}, after {took:.0} ms]",
            words.join(" "),
            changed.bump
        );
        self.screen.event(&line)?;
        for warning in &changed.warnings {
            self.screen.say(&format!("         warning: {warning}"))?;
        }
        self.bump = changed.bump;
        Ok(())
    }
}

/// Bytes that the server received by each link.
fn links(site: &Site) -> Result<[u64; 2]> {
    let [eth, wlan] = [TRUSTED, UNTRUSTED].map(|name| site.b.counters(name).map(|c| c.rx_bytes));
    Ok([eth?, wlan?])
}

fn since(before: [u64; 2], now: [u64; 2]) -> [u64; 2] {
    [now[0] - before[0], now[1] - before[1]]
}

fn overheard(listening: Capture, bump: InForce) -> Result<Overheard> {
    study(&listening.finish().context("the eavesdropper")?, bump)
}

fn tell(overheard: &Overheard) -> Result<()> {
    let Overheard {
        readable_before,
        readable_during,
        packets_during,
        ..
    } = overheard;
    write!(
        io::stdout(),
        "What was heard on wlan0, first bytes of the payload\n\
         before, a TCP segment, one of {readable_before} with readable text:\n{}\
         after, a datagram of dibsd, one of {packets_during}:\n{}",
        dibs_eavesdrop::hex(&overheard.before, LINES),
        dibs_eavesdrop::hex(&overheard.during, LINES)
    )?;
    if *readable_during > 0 {
        let last = overheard.readable_for.as_secs_f64() * 1e3;
        writeln!(
            io::stdout(),
            "{readable_during} plain segments were queued at the switch; the last passed {last:.1} ms after."
        )?;
    }
    Ok(())
}

/// The verdict, which is the exit code.
fn judge(overheard: &Overheard, same: bool, bump: [[u64; 2]; 2]) -> Result<()> {
    ensure!(same, "another file arrived than was sent");
    ensure!(
        overheard.readable_before > 0,
        "the eavesdropper could not read the plain text"
    );
    ensure!(
        overheard.readable_for <= QUEUED,
        "plain text passed the untrusted link {:?} after the bump was in force",
        overheard.readable_for
    );
    let by_link = since(bump[0], bump[1]);
    for (bytes, name) in by_link.iter().zip(INTERFACES) {
        if *bytes < by_link.iter().sum::<u64>() / 100 {
            bail!("with the bump in force, {name} carried {bytes} bytes only");
        }
    }
    writeln!(
        io::stdout(),
        "\nThe file is the same, the connection was one, and nothing on wlan0 was readable under the bump."
    )?;
    Ok(())
}

/// A file that is gone when closed, on a disk rather than in memory.
fn scratch_file(size: u64) -> Result<File> {
    tempfile::tempfile_in(scratch_directory()).with_context(|| scratch_hint(size))
}

fn scratch_directory() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

fn scratch_hint(size: u64) -> String {
    format!(
        "{} bytes are needed in {}, or where TMPDIR names",
        2 * size,
        scratch_directory().display()
    )
}

fn hexadecimal(sum: &Sum) -> String {
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}
