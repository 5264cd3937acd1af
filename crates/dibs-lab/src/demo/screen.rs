//! What the viewer sees while the file is on its way: a bar on a terminal, lines elsewhere.

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Throughput is the mean of this time.
const WINDOW: Duration = Duration::from_millis(500);
/// How often a line is printed where there is no terminal.
const LINE: Duration = Duration::from_millis(500);

/// The state of the transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample<'a> {
    /// Bytes received of the file.
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
    bar: Option<ProgressBar>,
    total: u64,
    start: Instant,
    recent: VecDeque<(Instant, u64)>,
    last_line: Option<Instant>,
}

impl Screen {
    /// For a transfer of so many bytes, which begins now.
    pub(super) fn new(total: u64) -> Result<Self> {
        let bar = io::stdout().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stdout());
            let style = ProgressStyle::with_template("[{wide_bar}] {percent:>3} %\n{msg}")
                .expect("the template is valid");
            bar.with_style(style.progress_chars("#>-"))
        });
        Ok(Self {
            bar,
            total,
            start: Instant::now(),
            recent: VecDeque::new(),
            last_line: None,
        })
    }

    /// Says something that stays.
    pub(super) fn say(&self, text: &str) -> Result<()> {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => writeln!(io::stdout(), "{text}")?,
        }
        Ok(())
    }

    /// Says something that happened, with the time.
    pub(super) fn event(&self, text: &str) -> Result<()> {
        let seconds = self.start.elapsed().as_secs_f64();
        self.say(&format!("{seconds:5.1} s  {text}"))
    }

    /// Shows how things stand.
    pub(super) fn show(&mut self, sample: Sample<'_>) -> Result<()> {
        let now = Instant::now();
        self.recent.push_back((now, sample.received));
        while self.recent.len() > 2 && now - self.recent[0].0 > WINDOW {
            self.recent.pop_front();
        }
        let line = self.describe(sample);
        if let Some(bar) = &self.bar {
            bar.set_message(line);
            bar.set_position(sample.received);
            return Ok(());
        }
        if self.last_line.is_none_or(|last| now - last >= LINE) {
            self.last_line = Some(now);
            let percent = sample.received * 100 / self.total;
            self.event(&format!("{percent:3} %  {line}"))?;
        }
        Ok(())
    }

    fn describe(&self, sample: Sample<'_>) -> String {
        let (first, last) = match (self.recent.front(), self.recent.back()) {
            (Some(first), Some(last)) => (first, last),
            _ => return String::new(),
        };
        let seconds = (last.0 - first.0).as_secs_f64().max(1e-3);
        let megabits = (last.1 - first.1) as f64 * 8.0 / seconds / 1e6;
        format!(
            "{:<8} {megabits:5.0} Mbit/s  eth0 {:>5} MB  wlan0 {:>5} MB  retransmissions {}",
            sample.bump,
            sample.links[0] / 1_000_000,
            sample.links[1] / 1_000_000,
            sample.retransmissions
        )
    }

    /// Removes the bar.
    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
