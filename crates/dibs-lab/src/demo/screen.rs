//! What the viewer sees while the text is on its way: a line that is written anew on a terminal, and one now and then
//! elsewhere.

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// Throughput is the mean of so many looks.
const WINDOW: usize = 6;
/// How often a line is printed where there is no terminal.
const LINE: Duration = Duration::from_millis(500);
/// Where a line on a terminal begins anew.
const CLEAR: &str = "\r\x1b[K";

/// The state of the transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample<'a> {
    /// Bytes received of the text.
    pub(super) received: u64,
    /// The bump in force.
    pub(super) bump: &'a str,
    /// Bytes that passed the trusted link and the untrusted one, headers and all.
    pub(super) links: [u64; 2],
    /// Segments that the sender's kernel sent again.
    pub(super) retransmissions: u64,
}

/// Standard output.
pub(super) struct Screen {
    clear: &'static str,
    total: u64,
    start: Instant,
    recent: VecDeque<(Instant, u64)>,
    last_line: Option<Instant>,
}

impl Screen {
    /// For a transfer of so many bytes, which begins now.
    pub(super) fn new(total: u64) -> Self {
        Self {
            clear: if io::stdout().is_terminal() {
                CLEAR
            } else {
                ""
            },
            total,
            start: Instant::now(),
            recent: VecDeque::new(),
            last_line: None,
        }
    }

    /// Says something that stays.
    pub(super) fn say(&self, text: &str) -> io::Result<()> {
        writeln!(io::stdout(), "{}{text}", self.clear)
    }

    /// Says something that happened, with the time.
    pub(super) fn event(&self, text: &str) -> io::Result<()> {
        let seconds = self.start.elapsed().as_secs_f64();
        self.say(&format!("{seconds:5.1} s  {text}"))
    }

    /// Shows how things stand.
    pub(super) fn show(&mut self, sample: Sample<'_>) -> io::Result<()> {
        let now = Instant::now();
        self.recent.push_back((now, sample.received));
        if self.recent.len() > WINDOW {
            self.recent.pop_front();
        }
        let (begun, before) = self.recent[0];
        let seconds = (now - begun).as_secs_f64().max(1e-3);
        let line = format!(
            "{:3} %  {:<8} {:5.0} Mbit/s  eth0 {:>5} MB  wlan0 {:>5} MB  retransmissions {}",
            sample.received * 100 / self.total,
            sample.bump,
            (sample.received - before) as f64 * 8.0 / seconds / 1e6,
            sample.links[0] / 1_000_000,
            sample.links[1] / 1_000_000,
            sample.retransmissions
        );
        if !self.clear.is_empty() {
            write!(io::stdout(), "{}{line}", self.clear)?;
            return io::stdout().flush();
        }
        if self.last_line.is_none_or(|last| now - last >= LINE) {
            self.last_line = Some(now);
            self.event(&line)?;
        }
        Ok(())
    }
}
