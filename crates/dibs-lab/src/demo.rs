//! The demonstration: a text on its way over one TCP connection, into which the scrambler is put
//! and taken out again, while somebody listens on the untrusted link.

mod eavesdropper;
mod screen;
mod text;
mod transfer;

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};

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
/// If anything is not as promised: the connection broke, another text arrived, the eavesdropper
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
    let listening = Capture::start_heads(&site.b, UNTRUSTED)?;
    let address = SocketAddr::new(far, PORT);
    let transfer = Transfer::start(&site.a, &site.b, address, size)?;
    let from = transfer.from;
    let mut show = Show {
        screen: Screen::new(size),
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
    let (screen, at_start) = (show.screen, show.began);
    let received = transfer.finish()?;
    let at_end = links(&site)?;
    let seconds = received.duration.as_secs_f64();
    let mean = size as f64 * 8.0 / seconds / 1e6;
    screen.say(&format!(
        "Received in {seconds:.1} s, {mean:.0} Mbit/s on average.\n"
    ))?;
    let recording = listening.finish().context("the eavesdropper")?;
    let overheard = study(&recording, legs.bump)?;
    tell(&overheard)?;
    writeln!(out, "\nBytes by link, headers and all:")?;
    for (name, [from, to]) in [
        ("plain", [at_start, at_enable]),
        ("scramble", [at_enable, at_disable]),
        ("plain", [at_disable, at_end]),
    ] {
        let [eth, wlan] = since(from, to).map(|bytes| bytes / 1_000_000);
        writeln!(out, "  {name:<8}  eth0 {eth:>5} MB   wlan0 {wlan:>5} MB")?;
    }
    let [sent, arrived] = received.sums;
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
    /// Puts the bump in after a quarter of the text, and takes it out after three.
    fn direct(&mut self) -> Result<Legs> {
        self.watch_until(self.size / 4)?;
        let before = links(self.site)?;
        self.switch(
            "scramble",
            &format!("enable --dport {PORT} --bump scramble"),
        )?;
        let from = SystemTime::now();
        self.watch_until(self.size / 4 * 3)?;
        let to = SystemTime::now();
        let after = links(self.site)?;
        self.switch("plain", &format!("disable --dport {PORT}"))?;
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

    fn switch(&mut self, bump: &str, words: &str) -> Result<()> {
        let asked = Instant::now();
        let changed = self.laptop.switch(("--dport", PORT), bump)?;
        let (bump, took) = (changed.bump, asked.elapsed().as_secs_f64() * 1e3);
        let line = format!("laptop# dibsctl {words}   [{bump}, after {took:.0} ms]");
        self.screen.event(&line)?;
        for warning in &changed.warnings {
            self.screen.say(&format!("         warning: {warning}"))?;
        }
        self.bump = bump;
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
    ensure!(same, "another text arrived than was sent");
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
        "\nThe text is the same, the connection was one, and nothing on wlan0 was readable under the bump."
    )?;
    Ok(())
}

fn hexadecimal(sum: &Sum) -> String {
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}
